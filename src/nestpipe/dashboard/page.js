"use strict";
// The page of a run. It draws what `page_data` of view.py gives, and asks for it again while live.

const POLL_MS = 2000, SLOW_MS = 10000;
const inlined = JSON.parse(document.getElementById("data").textContent);
const live = inlined.live;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const STATUS = { running: "running", finished: "finished", stopped: "stopped", failed: "failed",
  lost: "lost" };
const LANES = ["loader", "copy", "keys", "route", "host", "write", "net", "compute", "dense_net"];
const RESOURCES = { compute: "compute and updates", net: "exchange between ranks",
  host: "rows to and from memory", route: "routing of keys", load: "reading and copying data",
  wait: "waiting for the slowest rank", idle: "no op ran" };
const COLOR_OF = { wait: "--c7", idle: "--c8" };
const colorOf = (resource) => COLOR_OF[resource] || `--op-${resource}`;

// Numbers as people read them.

function compact(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  const [unit, name] = SIZES.find(([least]) => size >= least * 0.9995) || [1, ""];
  return trim(value / unit, digits) + name;
}
const SIZES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
function trim(value, digits) {
  if (value === 0) return "0";
  const text = Math.abs(value) >= 10 ** (digits - 1) ? value.toFixed(0) : value.toPrecision(digits);
  if (text.includes("e")) return text;
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
const percent = (value) => (value === null || value === undefined ? "–"
  : `${(100 * value).toFixed(value < 0.9995 ? 1 : 0)} %`);
const ms = (value) => (value === null || value === undefined ? "–"
  : value >= 10000 ? compact(value / 1000) + " s"
    : (value < 1 ? trim(Math.round(value * 100) / 100, 2) : trim(value, 3)) + " ms");
const bytes = (value) => (value === null || value === undefined ? "–"
  : compact(value).replace(/[kMGT]?$/, (size) => ` ${size}B`));
const whole = (value) => (value === null || value === undefined ? "–"
  : Math.round(value).toLocaleString("en-US"));
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const total = Math.round(seconds), h = Math.floor(total / 3600), m = Math.floor(total / 60) % 60;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${total % 60} s` : `${total} s`;
}
const clock = (seconds) => new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium",
  timeStyle: "medium" });

// Elements.

function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key === "style") for (const [k, v] of Object.entries(value)) made.style.setProperty(k, v);
    else if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
function svg(name, given = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(given)) {
    if (key === "style") for (const [k, v] of Object.entries(value)) made.style.setProperty(k, v);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Round ticks of an axis.

function ticks(low, high, count) {
  const span = high - low || 1, rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

// Ticks of one axis in one unit, with as many digits as tell them apart.

function tickText(values, { scale = 1, unit = "" } = {}) {
  const shown = values.map((v) => v * scale), top = Math.max(...shown.map(Math.abs));
  if (top > 0 && top < 1e-3) return shown.map((v) => (v === 0 ? "0" : v.toExponential(1) + unit));
  const [size, name] = SIZES.find(([least]) => top >= least) || [1, ""];
  let digits = 0;
  while (digits < 6 && shown.some((v) => Math.abs(v / size - (v / size).toFixed(digits)) > 1e-9 * top / size)) digits++;
  return shown.map((v) => (v === 0 ? "0" : (v / size).toFixed(digits) + (unit ? ` ${name}${unit}` : name)));
}

// A card with a chart of lines over steps: what it shows is a spec, made anew from each answer.

class Chart {
  constructor(card) {
    this.card = card;
    this.legend = el("div", { className: "legend" });
    this.plot = el("div", { className: "plot" });
    this.tip = el("div", { className: "tip", role: "status" });
    card.append(this.legend, this.plot);
    this.at = null;
    // One drawing for good: news must not take the focus from it.
    this.drawing = svg("svg", { role: "img", tabindex: 0 });
    this.drawing.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.leave());
    this.drawing.addEventListener("keydown", (event) => this.walk(event));
    this.drawing.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }
  show(spec) {
    this.spec = spec;
    this.draw();
  }
  draw() {
    const spec = this.spec, width = this.plot.clientWidth;
    if (!spec || !width) return;
    const series = spec.series.filter((s) => s.y.some((v) => v !== null && v !== undefined));
    const bad = spec.bad && spec.bad.y.some((v) => v > 0) ? spec.bad : null;
    this.shown = series;
    this.legend.replaceChildren(...(series.length > 1 || bad ? [...series, ...(bad ? [bad] : [])].map(key) : []));
    if (!series.length) {
      this.plot.replaceChildren(el("div", { className: "empty" }, spec.empty));
      return;
    }
    const height = spec.height || 224, box = { left: 56, right: width - 10, top: 24, bottom: height - 38 };
    const scale = this.scale = scales(spec, series, box), drawing = this.drawing;
    drawing.setAttribute("height", height);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("aria-label", `${spec.title} at step ${whole(spec.across[1])}: `
      + series.map((s) => `${s.name} ${spec.format(last(s.y))}`).join(", ") + ". Arrow keys walk over the steps.");
    drawing.replaceChildren();
    axes(drawing, spec, scale, box, width);
    if (spec.stacked) stackedAreas(drawing, series.filter((s) => !s.beside), scale);
    for (const one of series) if (!spec.stacked || one.beside) line(drawing, one, scale);
    if (bad) badSteps(drawing, bad, scale);
    this.cursor = svg("g");
    drawing.append(this.cursor);
    if (drawing.parentNode !== this.plot) this.plot.replaceChildren(drawing, this.tip);
    if (this.at !== null) this.mark(this.at);
  }
  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    if (!by || !this.shown.length) return;
    event.preventDefault();
    const x = this.main().x, now = this.at === null ? x.length - 1 : nearest(x, this.at) + by;
    this.mark(x[Math.max(0, Math.min(x.length - 1, now))]);
  }
  main() {
    return this.shown.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  }
  point(offset) {
    const { x0, x1, left, right } = this.scale;
    this.mark(x0 + ((offset - left) / (right - left)) * (x1 - x0));
  }
  leave() {
    this.at = null;
    this.cursor.replaceChildren();
    this.tip.style.display = "none";
  }
  mark(step) {
    const spec = this.spec, { x, y } = this.scale;
    const main = this.main(), bad = spec.bad;
    const found = main.x[nearest(main.x, step)];
    this.at = found;
    const rows = [], dots = [];
    let below = 0;
    for (const one of this.shown) {
      const place = nearest(one.x, found), value = one.y[place];
      if (value === null || value === undefined) continue;
      const low = one.low && one.low[place], high = one.high && one.high[place];
      const range = low != null && high != null && high > low
        ? ` (${spec.format(low)} to ${spec.format(high)})` : "";
      const when = one.x === main.x ? "" : ` at step ${whole(one.x[place])}`;
      rows.push(el("span", {}, el("span", { style: { display: "inline" } },
        el("i", { style: { "--key": `var(${one.color})` } }), one.name + when),
      el("span", {}, spec.format(value) + range)));
      const shownAt = spec.stacked && !one.beside ? (below += value) : value;
      dots.push(svg("circle", { cx: x(one.x[place]), cy: y(shownAt), r: 4, style: {
        fill: `var(${one.color})`, stroke: "var(--card)", "stroke-width": "1.5" } }));
    }
    const lost = bad && bad.y[nearest(bad.x, found)];
    if (lost) rows.push(el("span", {}, bad.name, el("span", {}, `in ${whole(lost)} ${lost === 1 ? "step" : "steps"}`)));
    const place = x(found), box = this.scale;
    this.cursor.replaceChildren(svg("line", { x1: place, x2: place, y1: box.top, y2: box.bottom,
      style: { stroke: "var(--soft)", "stroke-dasharray": "3 3" } }), ...dots);
    this.tip.replaceChildren(el("b", {}, `step ${whole(found)}`), ...rows);
    this.tip.style.display = "block";
    const room = this.plot.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, place > room - 20 ? place - this.tip.offsetWidth - 14 : place + 14))}px`;
    this.tip.style.top = "6px";
  }
}
const last = (list) => list.filter((v) => v !== null && v !== undefined).at(-1);
const key = (one) => el("span", {}, el("i", { className: one.box ? "box" : "",
  style: { "--key": `var(${one.color})` } }), one.name);
function nearest(list, value) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - list[low - 1] < list[low] - value ? low - 1 : low;
}

function scales(spec, series, box) {
  const xs = [...spec.across, ...series.flatMap((s) => [s.x[0], s.x.at(-1)])];
  let x0 = Math.min(...xs), x1 = Math.max(...xs);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  let y0 = Infinity, y1 = -Infinity;
  if (spec.stacked) {
    y0 = 0;
    const sum = (i, some) => some.reduce((all, s) => all + (s.y[i] || 0), 0);
    const below = series.filter((s) => !s.beside), beside = series.filter((s) => s.beside);
    const tops = series[0].x.map((_, i) => Math.max(sum(i, below), ...beside.map((s) => s.y[i] || 0)));
    const sorted = [...tops].sort((a, b) => a - b);
    y1 = spec.all ? sorted.at(-1) : Math.min(sorted.at(-1), 1.3 * sorted[Math.floor(0.985 * (sorted.length - 1))]);
  } else {
    // A spike, as at the very start, may leave the chart: it would press all else flat.
    const values = series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]
      .filter((v) => v !== null && v !== undefined));
    const sorted = [...values].sort((a, b) => a - b), at = (q) => sorted[Math.floor(q * (sorted.length - 1))];
    const [low, high] = spec.all ? [sorted[0], sorted.at(-1)] : [at(0.005), at(0.995)];
    const slack = 0.15 * (high - low);
    y0 = Math.max(sorted[0], low - slack);
    y1 = Math.min(sorted.at(-1), high + slack);
  }
  if (spec.zero) y0 = Math.min(0, y0);
  if (spec.max !== undefined) y1 = Math.max(y1, spec.max);
  if (y0 === y1) { y1 = y0 + (Math.abs(y0) || 1) * 0.1; if (!spec.zero) y0 -= (Math.abs(y0) || 1) * 0.1; }
  const pad = (y1 - y0) * 0.05;
  if (!spec.zero) y0 -= pad;
  y1 += pad;
  const clamp = (v) => Math.max(box.top - 2, Math.min(box.bottom + 2, v));
  return { ...box, x0, x1, y0, y1,
    x: (v) => box.left + ((v - x0) / (x1 - x0)) * (box.right - box.left),
    y: (v) => clamp(box.bottom - ((v - y0) / (y1 - y0)) * (box.bottom - box.top)) };
}

function axes(drawing, spec, scale, box, width) {
  drawing.append(svg("text", { x: 0, y: 12 }, spec.unit));
  const up = ticks(scale.y0, scale.y1, 6).filter((tick) => !spec.counts || tick === Math.round(tick));
  const texts = tickText(up, spec.ticks);
  up.forEach((tick, i) => {
    const place = scale.y(tick);
    if (place > box.bottom || place < box.top) return;
    drawing.append(svg("line", { x1: box.left, x2: box.right, y1: place, y2: place,
      style: { stroke: "var(--grid)" } }));
    drawing.append(svg("text", { x: box.left - 7, y: place + 4, "text-anchor": "end" }, texts[i]));
  });
  const across = ticks(scale.x0, scale.x1, width > 480 ? 6 : 3).filter((tick) => tick === Math.round(tick) && tick >= 0);
  const steps = tickText(across);
  across.forEach((tick, i) => {
    const place = scale.x(tick);
    drawing.append(svg("text", { x: place, y: box.bottom + 17,
      "text-anchor": place > box.right - 18 ? "end" : place < box.left + 10 ? "start" : "middle" }, steps[i]));
  });
  for (const step of spec.resumed || []) {
    if (step < scale.x0 || step > scale.x1) continue;
    drawing.append(svg("line", { x1: scale.x(step), x2: scale.x(step), y1: box.top, y2: box.bottom,
      style: { stroke: "var(--soft)", "stroke-dasharray": "1 3" } }, svg("title", {}, `resumed at step ${whole(step)}`)));
  }
  drawing.append(svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom,
    style: { stroke: "var(--line)" } }));
  drawing.append(svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 32, "text-anchor": "middle" }, "step"));
}

// Steps without a value, as a thick part of the axis.

function badSteps(drawing, bad, scale) {
  bad.y.forEach((count, i) => {
    if (!count) return;
    const from = scale.x(i ? bad.x[i - 1] : bad.x[0]), to = scale.x(bad.x[i]);
    drawing.append(svg("rect", { x: Math.min(from, to - 3), y: scale.bottom - 3, width: Math.max(3, to - from),
      height: 6, style: { fill: `var(${bad.color})` } }));
  });
}

function line(drawing, one, scale) {
  const known = one.x.map((x, i) => [scale.x(x), one.y[i], i]).filter(([, y]) => y !== null && y !== undefined);
  if (one.low) {
    const inside = known.filter(([, , i]) => one.low[i] != null && one.high[i] != null);
    const upper = inside.map(([x, , i]) => `${x.toFixed(1)},${scale.y(one.high[i]).toFixed(1)}`);
    const lower = inside.map(([x, , i]) => `${x.toFixed(1)},${scale.y(one.low[i]).toFixed(1)}`).reverse();
    drawing.append(svg("polygon", { points: [...upper, ...lower].join(" "),
      style: { fill: `var(${one.color})`, opacity: "var(--band)" } }));
  }
  const places = known.flatMap(([x, y], n) => {
    const at = [`${x.toFixed(1)},${scale.y(y).toFixed(1)}`];
    if (one.stairs && n) at.unshift(`${x.toFixed(1)},${scale.y(known[n - 1][1]).toFixed(1)}`);
    return at;
  });
  if (places.length > 1 && one.beside) { // it lies on areas
    drawing.append(svg("polyline", { points: places.join(" "), style: { fill: "none",
      stroke: "var(--card)", "stroke-width": "5", opacity: "0.75" } }));
  }
  if (places.length > 1) {
    drawing.append(svg("polyline", { points: places.join(" "), style: { fill: "none",
      stroke: `var(${one.color})`, "stroke-width": "2", "stroke-linejoin": "round",
      "stroke-dasharray": one.dash || "none" } }));
  }
  if (one.points || places.length === 1) {
    for (const [x, y] of known) {
      drawing.append(svg("circle", { cx: x, cy: scale.y(y), r: 3.5, style: { fill: `var(${one.color})` } }));
    }
  }
}

function stackedAreas(drawing, series, scale) {
  const x = series[0].x, known = x.map((_, i) => i).filter((i) => series.some((s) => s.y[i] != null));
  let below = known.map(() => 0);
  for (const one of series) {
    const above = known.map((i, k) => below[k] + (one.y[i] || 0));
    const upper = known.map((i, k) => `${scale.x(x[i]).toFixed(1)},${scale.y(above[k]).toFixed(1)}`);
    const lower = known.map((i, k) => `${scale.x(x[i]).toFixed(1)},${scale.y(below[k]).toFixed(1)}`).reverse();
    drawing.append(svg("polygon", { points: [...upper, ...lower].join(" "),
      style: { fill: `var(${one.color})`, opacity: "0.85", stroke: "var(--card)", "stroke-width": "0.7" } }));
    if (known.length === 1) {
      const [high, low] = [scale.y(above[0]), scale.y(below[0])];
      drawing.append(svg("rect", { x: scale.x(x[known[0]]) - 12, y: high, width: 24, height: Math.max(0, low - high),
        style: { fill: `var(${one.color})`, opacity: "0.85" } }));
    }
    below = above;
  }
}

// When ops ran: one row for each lane, a box for each op.

class LanesView {
  constructor(card) {
    this.rank = el("select", { ariaLabel: "Rank" });
    this.moment = el("input", { type: "range", min: 0, ariaLabel: "Moment of the run" });
    this.said = el("span");
    this.rankLabel = el("label", {}, "rank", this.rank);
    this.controls = el("div", { className: "controls" }, this.rankLabel,
      el("label", {}, "moment", this.moment), this.said);
    this.legend = el("div", { className: "legend" });
    this.plot = el("div", { className: "plot" });
    this.tip = el("div", { className: "tip", role: "status" });
    card.append(this.controls, this.legend, this.plot);
    this.follow = true;
    this.rank.addEventListener("change", () => { this.follow = true; this.draw(); });
    this.moment.addEventListener("input", () => {
      this.follow = Number(this.moment.value) === Number(this.moment.max);
      this.draw();
    });
    this.drawing = svg("svg", { role: "img", tabindex: 0 });
    this.at = null;
    this.drawing.addEventListener("keydown", (event) => this.walk(event));
    this.drawing.addEventListener("blur", () => this.leave());
    this.drawing.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }
  show(windows, resources, over) {
    this.windows = windows;
    this.over = over;
    this.resources = resources;
    const ranks = [...new Set(windows.map((w) => w.rank))], chosen = this.rank.value;
    if (ranks.join() !== this.ranks) {
      this.ranks = ranks.join();
      this.rank.replaceChildren(...ranks.map((r) => el("option", { value: r }, String(r))));
      if (chosen !== "" && ranks.includes(Number(chosen))) this.rank.value = chosen;
    }
    this.rankLabel.hidden = ranks.length < 2;
    this.draw();
  }
  draw() {
    if (!this.windows) return;
    const mine = this.windows.filter((w) => w.rank === Number(this.rank.value || 0));
    this.controls.hidden = !mine.length;
    this.moment.max = Math.max(0, mine.length - 1);
    this.moment.parentElement.hidden = mine.length < 2;
    if (this.follow) this.moment.value = this.moment.max;
    const seen = mine[Math.min(mine.length - 1, Number(this.moment.value))];
    if (!seen) {
      this.legend.replaceChildren();
      this.plot.replaceChildren(el("div", { className: "empty" },
        this.over ? "No batches timed." : "No batches timed yet: the first drawing comes after some steps."));
      return;
    }
    this.said.textContent = `step ${whole(seen.step)}, ${clock(seen.time)}, ${ms(seen.ms)} drawn`;
    this.moment.setAttribute("aria-valuetext", this.said.textContent);
    this.paint(seen);
  }
  paint(seen) {
    const width = this.plot.clientWidth;
    if (!width) return;
    const lanes = LANES.filter((lane) => seen.spans.some((s) => s[1] === lane));
    const row = 30, left = width > 520 ? 84 : 66, top = 4, bottom = top + lanes.length * row;
    const right = width - 8, x = (t) => left + (Math.max(0, Math.min(seen.ms, t)) / seen.ms) * (right - left);
    const drawing = this.drawing;
    if (seen !== this.seen) this.leave();
    this.seen = seen;
    drawing.setAttribute("height", bottom + 36);
    drawing.setAttribute("viewBox", `0 0 ${width} ${bottom + 36}`);
    drawing.setAttribute("aria-label", `${seen.spans.length} ops on ${lanes.length} lanes in ${ms(seen.ms)}. Arrow keys walk over them.`);
    drawing.replaceChildren();
    this.ops = [];
    lanes.forEach((lane, i) => {
      drawing.append(svg("rect", { x: left, y: top + i * row + 2, width: right - left, height: row - 4, rx: 3,
        style: { fill: "var(--grid)" } }));
      drawing.append(svg("text", { x: left - 8, y: top + i * row + row / 2 + 4, "text-anchor": "end" }, lane));
    });
    const groups = new Set();
    for (const [kind, lane, batch, micro, start, end] of seen.spans) {
      const group = this.resources[kind] || "net", y = top + lanes.indexOf(lane) * row + 4;
      groups.add(group);
      const x0 = x(start), wide = Math.max(1, x(end) - x0);
      const box = svg("rect", { x: x0, y, width: wide, height: row - 8, rx: Math.min(3, wide / 3),
        style: { fill: `var(${colorOf(group)})`, stroke: "var(--card)", "stroke-width": "0.8" } });
      const name = `${kind} ${batch}` + (micro === null ? "" : `.${micro}`);
      const tell = () => this.tell(name, lane, start, end, x0, y);
      box.addEventListener("pointerenter", tell);
      box.addEventListener("pointerleave", () => this.leave());
      drawing.append(box);
      this.ops.push({ tell, box });
      if (wide > 7 * name.length + 6) {
        drawing.append(svg("text", { x: x0 + wide / 2, y: y + row / 2, "text-anchor": "middle",
          style: { fill: "var(--on-op)", "font-size": "11.5px", "pointer-events": "none" } }, name));
      }
    }
    for (const tick of ticks(0, seen.ms, width > 520 ? 8 : 4)) {
      drawing.append(svg("text", { x: x(tick), y: bottom + 15,
        "text-anchor": x(tick) > right - 12 ? "end" : "middle" }, compact(tick)));
    }
    drawing.append(svg("text", { x: (left + right) / 2, y: bottom + 31, "text-anchor": "middle" }, "milliseconds"));
    this.legend.replaceChildren(...Object.keys(RESOURCES).filter((g) => groups.has(g))
      .map((g) => key({ name: RESOURCES[g], color: colorOf(g), box: true })));
    if (drawing.parentNode !== this.plot) this.plot.replaceChildren(drawing, this.tip);
    if (this.at !== null) this.mark(this.at);
  }
  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    if (!by) return;
    event.preventDefault();
    const from = this.at === null ? (by > 0 ? -1 : this.ops.length) : this.at;
    this.mark(Math.max(0, Math.min(this.ops.length - 1, from + by)));
  }
  mark(at) {
    this.leave();
    this.at = at;
    this.ops[at].box.style.setProperty("stroke", "var(--ink)");
    this.ops[at].tell();
  }
  leave() {
    if (this.at !== null && this.ops[this.at]) this.ops[this.at].box.style.setProperty("stroke", "var(--card)");
    this.at = null;
    this.tip.style.display = "none";
  }
  tell(name, lane, start, end, x, y) {
    this.tip.replaceChildren(el("b", {}, name), el("span", {}, "lane", el("span", {}, lane)),
      el("span", {}, "took", el("span", {}, ms(end - start))),
      el("span", {}, "from", el("span", {}, ms(Math.max(0, start)))));
    this.tip.style.display = "block";
    this.tip.style.left = `${Math.max(0, Math.min(this.plot.clientWidth - this.tip.offsetWidth, x))}px`;
    this.tip.style.top = `${y + 30}px`;
  }
}

// How busy each lane was: a row for each, the darker the busier.

class BusyView {
  constructor(card) {
    this.plot = el("div", { className: "plot" });
    this.tip = el("div", { className: "tip" });
    card.append(this.plot);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }
  show(steps, lanes, empty) {
    this.steps = steps;
    this.empty = empty;
    this.lanes = LANES.filter((lane) => lane in lanes).map((lane) => [lane, lanes[lane]]);
    this.draw();
  }
  draw() {
    const width = this.plot.clientWidth;
    if (!this.lanes || !width) return;
    if (!this.lanes.length) {
      this.plot.replaceChildren(el("div", { className: "empty" }, this.empty));
      return;
    }
    // As high as the list of ops beside it.
    const row = width > 380 ? Math.max(30, Math.min(46, 300 / this.lanes.length)) : 30, left = 72, right = width - 52, bottom = 4 + this.lanes.length * row;
    const count = Math.min(this.steps.length, Math.floor((right - left) / 6)), wide = (right - left) / count;
    const drawing = svg("svg", { height: bottom + 36, viewBox: `0 0 ${width} ${bottom + 36}`, role: "img",
      "aria-label": "Busy lanes: " + this.lanes.map(([lane, y]) => `${lane} ${percent(last(y))}`).join(", ") });
    this.lanes.forEach(([lane, y], i) => {
      const top = 4 + i * row;
      drawing.append(svg("text", { x: left - 8, y: top + row / 2 + 4, "text-anchor": "end" }, lane));
      drawing.append(svg("text", { x: right + 8, y: top + row / 2 + 4 }, percent(last(y))));
      drawing.append(svg("rect", { x: left, y: top + 2, width: right - left, height: row - 4,
        style: { fill: "var(--grid)" } }));
      for (let n = 0; n < count; n++) {
        const [from, to] = [n, n + 1].map((k) => Math.floor((k * this.steps.length) / count));
        const known = y.slice(from, to).filter((v) => v !== null);
        if (!known.length) continue;
        const value = known.reduce((a, b) => a + b, 0) / known.length;
        const box = svg("rect", { x: left + n * wide, y: top + 2, width: wide + 0.4, height: row - 4,
          style: { fill: "var(--c1)", opacity: Math.min(1, value).toFixed(3) } });
        box.addEventListener("pointerenter", () => this.tell(lane, this.steps[to - 1], value, left + n * wide, top));
        box.addEventListener("pointerleave", () => { this.tip.style.display = "none"; });
        drawing.append(box);
      }
    });
    const first = this.steps[0], ends = [[left, "start", first], [right, "end", this.steps.at(-1)]];
    for (const [x, anchor, step] of ends) {
      drawing.append(svg("text", { x, y: bottom + 15, "text-anchor": anchor }, compact(step)));
    }
    drawing.append(svg("text", { x: (left + right) / 2, y: bottom + 31, "text-anchor": "middle" }, "step"));
    this.plot.replaceChildren(drawing, this.tip);
  }
  tell(lane, step, value, x, y) {
    this.tip.replaceChildren(el("b", {}, `step ${whole(step)}`), el("span", {}, lane, el("span", {}, percent(value))));
    this.tip.style.display = "block";
    this.tip.style.left = `${Math.max(0, Math.min(this.plot.clientWidth - this.tip.offsetWidth, x))}px`;
    this.tip.style.top = `${y + 32}px`;
  }
}

// The cards, in the order of the page.

function card(title, text, wide = false) {
  const made = el("section", { className: wide ? "card wide" : "card" },
    el("h2", {}, title), el("p", {}, text));
  $("cards").append(made);
  return made;
}
const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const cards = {};
const BASELINE = /(^|\/)(baseline|samples|popularity)/;

function build() {
  cards.limitCard = card("What limits a step", "", true);
  cards.limit = cards.limitCard.appendChild(el("div"));
  cards.limitText = cards.limitCard.querySelector("p");
  cards.limitText.className = "said";
  cards.loss = new Chart(card("Loss", "Mean of each batch; the band is the lowest and highest between two points."));
  cards.speed = new Chart(card("Throughput", "Samples a second by the clock, evaluations and checkpoints included."));
  cards.metricsCard = card("Evaluation", "Metrics on held-out samples, and those of training since the one before.");
  cards.metric = el("select", { ariaLabel: "Metric" });
  cards.metricControls = el("div", { className: "controls" }, el("label", {}, "metric", cards.metric));
  cards.metricsCard.append(cards.metricControls);
  cards.metrics = new Chart(cards.metricsCard);
  cards.metric.addEventListener("change", () => cards.metricsDrawn());
  cards.time = new Chart(card("Where a step’s time goes", "Mean over ranks of the batches looked at. Hidden time ran under compute and cost nothing."));
  cards.lanes = new LanesView(card("Lanes", "When each op ran, with its step and micro-batch: what lies above or below compute is hidden by it.", true));
  cards.choicesCard = card("Choices", "What the adaptive run has set, from which step on, and why. nestpipe verify replays these choices.", true);
  cards.choices = new Chart(cards.choicesCard);
  cards.choiceTable = cards.choicesCard.appendChild(el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Choices" }));
  cards.ops = card("Hidden and exposed, by op", "Milliseconds of a recent step; only the exposed part makes it longer.");
  cards.opList = cards.ops.appendChild(el("div"));
  cards.busy = new BusyView(card("How busy lanes are", "Part of the time in which a lane ran an op, over the steps; on the right the last."));
  cards.keys = new Chart(card("Keys", "Part of a batch’s keys that the batch before had, and part whose rows needed no read from host memory."));
  cards.growthCard = card("Table growth", "");
  cards.growth = new Chart(cards.growthCard);
  cards.wire = new Chart(card("Bytes on the wire", "Sent by all ranks together in a step."));
  cards.rows = new Chart(card("Rows moved", "By all ranks in a step: read from host memory, refreshed, written back."));
  cards.skewCard = card("Skew between ranks", "What a rank spends on the network beyond the rank that comes last: it waits for the slowest.", true);
  cards.skew = new Chart(cards.skewCard);
  cards.rankTable = cards.skewCard.appendChild(el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Ranks" }));
}

const PERCENT = { format: percent, ticks: { scale: 100 }, zero: true, unit: "%" };
const MS = { format: ms, zero: true, unit: "ms a step" };

function showCharts(data) {
  const s = data.series, x = s.step || [], of = (name) => s[name] || [];
  const one = (name, y, color, more = {}) => ({ name, x, y, color, ...more });
  const over = { across: [x.length > 1 ? x[0] : 0, x.at(-1) || 0], resumed: data.run.resumed };
  const yet = data.run.status === "running" ? " yet" : "";
  showLimit(data);
  cards.loss.show({ ...over, title: "Loss", unit: "loss", format: (v) => compact(v, 4), empty: x.length ? "The loss of every step was NaN or inf." : `No steps${yet}.`,
    bad: one("NaN or inf", of("loss_not_finite"), "--bad"),
    series: [one("training", of("loss"), "--c1", { low: of("loss_low"), high: of("loss_high") }),
      ...evaluated(data, "loss", "--c2")] });
  cards.speed.show({ ...over, title: "Throughput", unit: "samples/s", format: (v) => `${compact(v)}/s`, zero: true,
    empty: `No steps${yet}.`,
    series: [one("samples", of("samples_per_s"), "--c3")] });
  cards.time.show({ ...over, title: "Time of a step", ...MS, stacked: true, empty: `No batches timed${yet}.`,
    series: [one("compute and updates", of("compute_ms"), "--c1", { box: true }),
      one("exposed", of("exposed_ms"), "--c2", { box: true }),
      one("no op ran", of("idle_ms"), "--c8", { box: true }),
      one("hidden under compute", of("hidden_ms"), "--c3", { beside: true, dash: "5 3" })] });
  cards.busy.show(x, s.lanes || {}, `No batches timed${yet}.`);
  const pool = data.run.retrieval === "pooled";
  cards.keys.show({ ...over, title: "Keys", ...PERCENT, empty: `No keys compared${yet}.`, series: [
    one("shared with the batch before", of("keys_shared"), "--c4"),
    one(pool ? "found in the pool" : "needed no read", of("without_read"), "--c3"),
    one("pool slots taken", of("pool_used"), "--c8", { dash: "5 4" })] });
  cards.growth.show({ ...over, title: "Table growth", unit: "rows", format: whole, stacked: true, all: true,
    empty: `No rows${yet}.`,
    series: data.tables.map((t, i) => one(t.name, t.rows, COLORS[Math.min(i, 7)], { box: true })) });
  cards.wire.show({ ...over, title: "Bytes on the wire", unit: "a step", format: bytes, ticks: { unit: "B" }, zero: true,
    empty: data.run.ranks > 1 ? `Nothing sent${yet}.` : "One rank has all rows: nothing goes over a network.",
    series: data.run.ranks > 1 ? [one("sent", of("bytes_per_step"), "--c6")] : [] });
  cards.rows.show({ ...over, title: "Rows moved", unit: "rows a step", format: whole, zero: true,
    empty: `No rows moved${yet}.`, series: [
    one("read", of("rows_read"), "--c3"), one("refreshed", of("rows_refreshed"), "--c4"),
    one("written back", of("rows_written"), "--c5", { dash: "6 4" })] });
  cards.skewCard.hidden = data.run.ranks < 2;
  cards.skew.show({ ...over, title: "Skew", ...MS, height: 180, empty: `No batches of several ranks timed${yet}.`,
    series: data.run.ranks > 1 ? [one("longest wait of a rank", of("waited_ms"), "--c7"), one("mean wait", of("waited_mean_ms"), "--c8")] : [] });
  cards.growthCard.querySelector("p").textContent = "Rows in the host stores of all ranks, by table"
    + (pool ? "; new rows count once they leave the pool." : ".");
  showChoices(data, over);
  cards.lanes.show(data.lanes, data.resources, !yet);
  showOps(data, yet);
  showRanks(data);
  showMetrics(data, over, yet);
}

// In words, what a recent step is spent on.

const LIMITED_BY = {
  compute: "Compute: forward, backward and updates are the longest part of a step.",
  net: "The network: exchange between ranks that nothing hides is the longest part of a step.",
  host: "Host memory: rows on their way that nothing hides are the longest part of a step.",
  route: "Routing: keys sorted to their owners, hidden by nothing, are the longest part of a step.",
  load: "Data: reading and copying that nothing hides is the longest part of a step.",
  idle: "Waiting: in the longest part of a step no op ran. Others may have the cores.",
};
function showLimit(data) {
  const found = data.limit;
  cards.limitCard.hidden = !found;
  if (!found) return;
  const said = found.resource === "wait" ? `Rank ${found.rank}: the others wait for it, which is the longest part of a step.` : LIMITED_BY[found.resource];
  const op = found.op && found.op !== "idle" && found.resource !== "wait" ? ` The longest wait is for ${found.op}.` : "";
  const between = found.between_steps ? ` ${percent(found.between_steps)} of the clock lies between steps: evaluations, checkpoints, the start.` : "";
  cards.limitText.textContent = said + op + between;
  const named = (part) => (part.resource === "wait" ? `waiting for rank ${found.rank}` : RESOURCES[part.resource]);
  const share = (part) => `${named(part)} ${ms(part.ms)} (${percent(part.share)})`;
  cards.limit.replaceChildren(
    el("div", { className: "split", role: "img", ariaLabel: found.parts.map(share).join(", ") },
      ...found.parts.map((part) => el("i", { title: share(part), style: { "flex-grow": part.share, background: `var(${colorOf(part.resource)})` } }))),
    el("div", { className: "legend" }, ...found.parts.filter((part) => part.share >= 0.005)
      .map((part) => key({ name: share(part), color: colorOf(part.resource), box: true }))));
}

function showChoices(data, over) {
  const made = data.choices;
  cards.choicesCard.hidden = !made.length;
  if (!made.length) return;
  const x = made.map((c) => c.step), y = made.map((c) => c.micro_batches);
  cards.choices.show({ ...over, title: "Choices", unit: "micro-batches", format: whole, zero: true, all: true, counts: true,
    height: 160, empty: "", series: [{ name: "micro-batches", x: [...x, over.across[1]], y: [...y, y.at(-1)], color: "--c1", stairs: true }] });
  const sizes = (c) => (c.first === 1 && c.last === 1 ? "even" : `first ${c.first}, last ${c.last}`);
  const columns = [["from step", (c) => whole(c.step)], ["micro-batches", (c) => c.micro_batches], ["sizes", sizes],
    ["pool", (c) => c.device_memory], ["why", (c) => c.reason]];
  cards.choiceTable.replaceChildren(table(columns, made.slice(-8).reverse(), "reasons"));
}

function table(columns, rows, name = "") {
  const head = el("tr", {}, ...columns.map(([title]) => el("th", { scope: "col" }, title)));
  const body = rows.map((row) => el("tr", {}, ...columns.map(([, of]) => el("td", {}, String(of(row))))));
  return el("table", { className: name }, el("thead", {}, head), el("tbody", {}, ...body));
}

function evaluated(data, name, color) {
  const found = data.evaluations.filter((e) => typeof e.metrics[name] === "number");
  if (!found.length) return [];
  return [{ name: found.at(-1).split || "evaluation", x: found.map((e) => e.step),
    y: found.map((e) => e.metrics[name]), color, points: true }];
}

function showMetrics(data, over, yet) {
  cards.metricsDrawn = () => showMetrics(shown, over, yet);
  const names = [...new Set(data.evaluations.flatMap((e) => Object.keys(e.metrics)))]
    .filter((n) => !BASELINE.test(n) && n !== "loss" && !/(^|\/)train_/.test(n));
  if (names.join() !== cards.metricNames) {
    cards.metricNames = names.join();
    const chosen = cards.metric.value;
    cards.metric.replaceChildren(...names.map((n) => el("option", { value: n }, n.replaceAll("_", " "))));
    if (names.includes(chosen)) cards.metric.value = chosen;
  }
  const name = cards.metric.value, [task, metric] = [name.slice(0, name.lastIndexOf("/") + 1), name.split("/").at(-1)];
  cards.metricControls.hidden = names.length < 2;
  const trained = evaluated(data, `${task}train_${metric}`, "--c1").map((s) => ({ ...s, name: "training" }));
  cards.metrics.show({ ...over, title: name || "Evaluation", unit: name.replaceAll("_", " "), all: true,
    format: (v) => trim(v, 4),
    empty: yet ? "No evaluation yet: run.eval_every says how often." : "No evaluation was made.",
    series: name ? [...evaluated(data, name, "--c2"), ...trained] : [] });
}

function showOps(data, yet) {
  const rows = data.kinds.filter((k) => (k.hidden_ms || 0) + (k.exposed_ms || 0) > 0);
  if (!rows.length) {
    cards.opList.replaceChildren(el("div", { className: "empty" }, `No batches timed${yet}.`));
    return;
  }
  const longest = Math.max(...rows.map((k) => k.hidden_ms + k.exposed_ms));
  const hidden = { name: "hidden", color: "--c3", box: true }, exposed = { name: "exposed", color: "--c2", box: true };
  const bar = (value, color) => el("i", { style: { width: `${(100 * value) / longest}%`, background: `var(${color})` } });
  cards.opList.replaceChildren(el("div", { className: "legend" }, key(hidden), key(exposed)),
    el("div", { className: "ops" }, ...rows.map((k) => el("div", { className: "op", title:
      `${k.kind}: ${ms(k.hidden_ms)} hidden, ${ms(k.exposed_ms)} exposed` },
    el("span", {}, k.kind === "idle" ? "no op" : k.kind),
    el("span", { className: "track" }, bar(k.hidden_ms, "--c3"), bar(k.exposed_ms, "--c2")),
    el("span", { className: "ms" }, k.exposed_ms >= 0.005 ? `${ms(k.exposed_ms)} exposed` : "hidden")))));
}

const RANK_COLUMNS = [["rank", (r) => r.rank], ["host", (r) => r.host], ["step", (r) => whole(r.step)], ["step time", (r) => ms(r.step_ms)],
  ["compute", (r) => ms(r.compute_ms)], ["network", (r) => ms(r.network_ms)], ["waited", (r) => ms(r.waited_ms)],
  ["keys asked", (r) => whole(r.keys_asked)], ["rows read", (r) => whole(r.rows_read)],
  ["sent", (r) => bytes(r.bytes_sent)], ["rows held", (r) => compact(r.rows)],
  ["state", (r) => (r.status === "running" && r.silent_s ? `silent for ${duration(r.silent_s)}` : r.status)]];

function showRanks(data) {
  cards.rankTable.hidden = data.ranks.length < 2;
  const apart = new Set(data.ranks.map((r) => r.host)).size > 1;
  cards.rankTable.replaceChildren(table(RANK_COLUMNS.filter(([name]) => apart || name !== "host"), data.ranks));
}

// The top of the page.

function showTop(data) {
  const run = data.run, now = data.now;
  document.title = `${run.name}: ${STATUS[run.status] || run.status}`;
  $("name").textContent = run.name;
  $("status").dataset.status = run.status;
  $("status").textContent = STATUS[run.status] || run.status;
  const count = `, ${run.micro_batches} micro-batch${run.micro_batches === 1 ? "" : "es"}`;
  const split = run.adaptive ? `${count} now (adaptive)` : run.micro_batches > 1 ? count : "";
  const facts = [["", run.model], ["plan ", `${run.plan}${split}`], ["retrieval ", run.retrieval],
    ["", `${run.ranks} ${run.ranks === 1 ? "rank" : "ranks"} on ${run.device}`], ...(run.groups > 1 ? [["", `${run.groups} groups`]] : []), ["batch ", whole(run.batch)]];
  $("facts").replaceChildren(...facts.flatMap(([word, value], i) => [i ? " · " : "", word, el("b", {}, String(value))]));
  const share = run.steps ? Math.min(1, run.step / run.steps) : null;
  $("bar").hidden = share === null;
  $("bar").firstElementChild.style.width = `${100 * (share || 0)}%`;
  $("progress").textContent = `step ${whole(run.step)}` + (run.steps ? ` of ${whole(run.steps)}` : "");
  $("left").textContent = run.left_s ? `about ${duration(run.left_s)} left` : `${duration(run.seconds)} in all`;
  const tile = (name, value, unit = "") => el("div", { className: "tile" }, el("dt", {}, name),
    el("dd", {}, value, el("small", {}, unit)));
  const split2 = (text) => { const at = text.lastIndexOf(" "); return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)]; };
  const tiles = [tile("Loss", now.loss_is_finite === false ? "NaN" : compact(now.loss, 4)), tile("Samples/s", compact(now.samples_per_s)),
    tile("Step", ...split2(ms(now.step_ms))), tile("Exposed", ...split2(percent(now.exposed))),
    tile("Keys shared", ...split2(percent(now.keys_shared))), tile("Rows", compact(now.rows))];
  if (run.ranks > 1) tiles.push(tile("Sent a step", ...split2(bytes(now.bytes_per_step))), tile("Longest wait", ...split2(ms(now.waited_ms))));
  else tiles.push(tile("No host read", ...split2(percent(now.without_read))));
  $("tiles").replaceChildren(...tiles);
  showNotices(data);
}

let unreachable = 0;
function showNotices(data) {
  const run = data.run, notices = [];
  const notice = (kind, title, text) => notices.push(el("div", { className: `notice ${kind}`, role: "alert" }, el("b", {}, title), text.slice(0, 1).toUpperCase() + text.slice(1)));
  if (run.status === "failed") notice("bad", `The run failed at step ${whole(run.step)}`, run.sentence || "It said nothing more.");
  if (run.status === "lost") notice("bad", `The run was lost after step ${whole(run.step)}`, run.sentence);
  if (run.status === "stopped") notice("warn", "The run was stopped by a signal", "With --resume auto it goes on from its checkpoint.");
  if (data.now.losses_not_finite) notice("bad", `The loss of ${whole(data.now.losses_not_finite)} of ${whole(run.step)} steps was NaN or inf`, "Curves and means leave these steps out.");
  if (data.now.faults) notice("warn", `${whole(data.now.faults)} gradients were NaN or inf, or weights beyond float16`, "The key run.non_finite says what is done with them.");
  if (run.ranks_seen < run.ranks && run.step) notice("warn", `${run.ranks_seen} of ${run.ranks} ranks are shown`, "The others write elsewhere, or nothing yet; ranks above 63 are not recorded.");
  if (run.damaged) notice("warn", `${run.damaged} lines of the record are damaged`, "They are left out.");
  if (unreachable) notice("warn", "The dashboard does not answer", `Shown is what was known at ${clock(unreachable)}. After a run, nestpipe show RUN opens it again.`);
  const said = notices.map((of) => of.textContent).join("\n");
  if (said === cards.said) return;
  cards.said = said; // else a screen reader would read them out at each answer
  $("notices").replaceChildren(...notices);
}

function showFooter(data) {
  const run = data.run;
  const resumed = run.resumed.length ? ` Resumed at step ${run.resumed.map(whole).join(", ")} (dotted lines).` : "";
  $("footer").textContent = `${run.started ? `Started ${clock(run.started)}. ` : ""}Last step written ${clock(run.updated)}.${resumed} `
    + (live ? "This page asks for news every 2 seconds." : "A report: nothing changes here any more.");
}

let shown = null;
function show(data) {
  shown = data;
  $("gate").hidden = true;
  $("page").hidden = false;
  showTop(data);
  showCharts(data);
  showFooter(data);
}

// Live: ask for news; the answer says when there are none.

let tag = "", token = null;
try { token = sessionStorage.getItem("nestpipe token"); } catch { token = null; }

async function ask() {
  const headers = { ...(tag ? { "If-None-Match": tag } : {}), ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  try {
    const answer = await fetch("v1/run", { headers, cache: "no-store" });
    if (answer.status === 401) return gate();
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(String(answer.status));
      const data = await answer.json();
      tag = answer.headers.get("ETag") || "";
      unreachable = 0;
      show(data);
    } else if (unreachable) {
      unreachable = 0;
      showNotices(shown);
    }
  } catch {
    if (!unreachable) unreachable = Date.now() / 1000;
    if (shown) showNotices(shown);
  }
  const slow = document.hidden || unreachable || (shown && shown.run.status !== "running");
  setTimeout(ask, slow ? SLOW_MS : POLL_MS);
}
function gate() {
  $("page").hidden = true;
  $("gate").hidden = false;
  if (token) $("gate-text").textContent = "That token is wrong; try another.";
  $("token").focus();
}
document.querySelector("#gate form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  try { sessionStorage.setItem("nestpipe token", token); } catch { /* a private window keeps nothing */ }
  ask();
});
build();
if (!live) show(inlined);
else if (inlined.needs_token && !token) gate();
else ask();
