#!/usr/bin/env bash
# What is measured on a GPU, in slices of under ten minutes, most telling first.
#
#   tools/gpu_session.sh prepare          where git is: the sources to compare with, into .lab/old
#   OUT=out tools/gpu_session.sh SLICE    on the GPU machine
#   tools/gpu_session.sh rehearse [SLICE ...]  on any machine: every step on the CPU, tiny, or its
#                                         arguments alone
#   tools/gpu_session.sh list [SLICE ...] the steps: name, seconds it may take, command
#
# Slices: first second third, which take what is most wanted of all others; hstu, the same for
# sequences; and tests rows host embedding cache copies dlrm ranks paper lab lab_old memory quality
# sweeps.
# A slice leaves $OUT/SLICE.json with the figures of every step, $OUT/SLICE.log with what they said,
# and what a viewer opens. All are written after each step, so a slice that is stopped has the rest.
# Needs torch with CUDA, triton and nvcc, and no network. TorchRec and FBGEMM come by
# `tools/lab.py put` and `unpack`, which slices do with .lab/piece.*; without them NestPipe runs
# alone. What is compared with an older commit needs .lab/old, else it is left out.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
OUT=${OUT:-out}
OLD=${OLD:-.lab/old}
OLD_COMMIT=${OLD_COMMIT:-e6b15e1}
LIMIT=${LIMIT:-540}          # seconds of a slice
LEAST=${LEAST:-10}           # a step that has fewer is left out
GRACE=${GRACE:-10}           # and one that is told to end has so many
MEMORY_GB=${MEMORY_GB:-128}  # of the machine when it has grown; its own count may start far lower
PYTHON=${PYTHON:-python3}
FIRST_SLICES="first second third hstu"
ALL_SLICES="$FIRST_SLICES tests rows host embedding cache copies dlrm ranks paper lab lab_old \
memory quality sweeps"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
mode=run
slice=
failed=0
began=$SECONDS

# Ends what is left of a step, its ranks and workers too: all have the session that it began.
session=
end_session() {
  if [[ -n $session ]]; then
    pkill -KILL -s "$session" 2>/dev/null || kill -KILL -- "-$session" 2>/dev/null
  fi
  session=
}
trap 'end_session; exit 143' INT TERM

# step NAME LIMIT COMMAND...: run it for at most LIMIT seconds and what the slice has left.
# Its figures are in $figures/NAME.json, if it writes any; its output goes to $work/NAME.txt.
step() {
  local name=$1 limit=$2 left=$((LIMIT - (SECONDS - began)))
  shift 2
  if [[ $mode == list ]]; then
    printf '%s\t%s\t%s\t' "$slice" "$name" "$limit"
    printf ' %q' "$@" | sed 's/^ //'
    printf '\n'
    return
  fi
  if [[ $mode == rehearse ]]; then
    rehearsed "$@"
    set -- "${tiny[@]}"
    left=240
    limit=240
  fi
  ((limit < left)) || limit=$left
  if ((limit < LEAST)); then
    echo "$name: no time left"
    note "$name" "no time left" 0 "$@"
    failed=1
    return
  fi
  echo "== $name: $*"
  local start=$SECONDS status
  setsid timeout -k "$GRACE" "$limit" "$@" >"$work/$name.txt" 2>&1 </dev/null &
  session=$!
  wait "$session"
  status=$?
  end_session
  tail -n "${TAIL:-12}" "$work/$name.txt" | cut -c -200
  if ((status)); then
    echo "$name: status $status after $((SECONDS - start)) s"
    failed=1
  fi
  note "$name" "$status" $((SECONDS - start)) "$@"
}

# Puts everything of the slice so far into $OUT, in few files.
note() {
  "$PYTHON" - "$work" "$OUT/$slice" "$@" <<'END'
import json, shutil, sys
from pathlib import Path

work, target, name, status, seconds = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
done = work / "steps.json"
steps = json.loads(done.read_text()) if done.exists() else []
figures = None
try:
    figures = json.loads((work / f"{name}.json").read_text())
except (OSError, ValueError):
    pass  # none, or half of it
steps.append({"step": name, "status": int(status) if status.isdigit() else status,
              "seconds": int(seconds), "command": sys.argv[6:], "figures": figures})
done.write_text(json.dumps(steps))
new = target.with_name(target.name + ".json.new")
new.write_text(json.dumps(steps, indent=1) + "\n")
new.rename(target.with_name(target.name + ".json"))
with target.with_name(target.name + ".log").open("w") as log:
    for step in steps:
        output = work / f"{step['step']}.txt"
        said = output.read_text(errors="replace") if output.exists() else ""
        half = 200_000  # of each: the beginning and the end
        if len(said) > 2 * half:
            said = f"{said[:half]}\n...\n{said[-half:]}"
        log.write(f"== {step['step']}, status {step['status']}, {step['seconds']} s\n{said}\n")
for trace in work.glob("*.json.gz"):
    shutil.copyfile(trace, target.with_name(trace.name))
END
}

py() {  # py NAME LIMIT SCRIPT...: a script of this folder, or -m MODULE
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" "$@"
}
bench() {  # bench NAME LIMIT COMMAND...
  local name=$1 limit=$2
  shift 2
  py "$name" "$limit" -m nestpipe bench "$@" --json "$work/$name.json"
}
gpu_tests() {  # gpu_tests NAME LIMIT ARGUMENTS...: a test that hangs says where, and ends the run
  local name=$1 limit=$2
  shift 2
  py "$name" "$limit" -m pytest -v -p no:benchmark -p no:cacheprovider \
    -o faulthandler_timeout=$((limit * 3 / 4)) "$@"
}

# Sets `tiny`: the same command, where it can run without a GPU with sizes that take seconds; else
# what reads its arguments alone.
rehearsed() {
  local dlrm=(--device cpu --batch 32 --rows 500 --steps 3 --set dim=8 --set 'bottom=[8]'
    --set 'top=[8]')
  local reads='import sys
sys.path.insert(0, "tests")
from support import triton_without_gpu
if not triton_without_gpu.HAS_TRITON:
    triton_without_gpu.install()
from support.tools import load_tool
tool = load_tool(sys.argv[1])
(tool.parse if hasattr(tool, "parse") else tool.parser().parse_args)(sys.argv[2:])'
  tiny=("$@")
  case "$*" in
    *"-m nestpipe bench dispatch"*) tiny+=("${dlrm[@]}") ;;
    *"-m nestpipe bench dlrm"*) tiny+=("${dlrm[@]}" --rounds 1 --set warm=2 --no-peer) ;;
    *"-m nestpipe bench embedding"*)
      tiny+=(--device cpu --tables 2 --samples 64 --rows 5000 --dim 8 --steps 3 --rounds 1
        --set warm=4 --set distinct=4 --no-peer)
      ;;
    *"-m nestpipe bench hstu"*)
      tiny+=(--device cpu --attention auto --batch 4 --length 64 --heads 2 --head-dim 16 --blocks 1
        --dim 32 --positions 0 --items 500 --users 500 --stored 100 --device-memory 4MB --warm 2
        --steps 2 --rounds 1)
      ;;
    *"-m nestpipe bench checkpoint"*)
      tiny+=(--every 2 --intervals 1 --rounds 1 --set run.device=cpu --set run.batch=8
        --set run.precision=fp32 --set data.synthetic.samples=64
        --set data.synthetic.test_samples=8 --set data.synthetic.num_items=500
        --set data.synthetic.min_len=4 --set data.synthetic.max_len=8 --set model.dim=16
        --set model.attention_dim=8 --set model.blocks=1 --set model.max_len=8)
      ;;
    *"-m nestpipe bench pipeline"*)
      tiny+=(--device cpu --ranks 1 --set rows=2000 --set steps=8 --set rounds=1 --set batch=16
        --set keys=4 --set dim=8 --set heads=2 --set width=8 --set blocks=1 --set optimizer=sgd)
      ;;
    *tools/bench_switches.py*)
      tiny+=(--device cpu --tables 2 --samples 64 --rows 5000 --dim 8 --distinct 8 --warm 3 --skip 2
        --steps 2 --rounds 1)
      ;;
    *"-m pytest"*)
      tiny+=(--collect-only -q -n 0)
      # Tests of Triton's kernels are not even read where it is missing.
      "$PYTHON" -c 'import triton' 2>/dev/null || tiny=(echo "pytest ${*:8}: triton is missing")
      ;;
    *tools/bench_attention.py*) tiny=("$PYTHON" -c "$reads" bench_attention "${@:3}") ;;
    *tools/bench_row_copies.py*) tiny=("$PYTHON" -c "$reads" bench_row_copies "${@:3}") ;;
    *tools/quality_runs.py*) tiny=("$PYTHON" -c "$reads" quality_runs "${@:3}") ;;
    *tools/lab.py*) tiny=("$PYTHON" -c "$reads" lab "${@:3}") ;;
    *tools/bench_device_index.py*) tiny=("$PYTHON" -c "$reads" bench_device_index "${@:3}") ;;
  esac
}

# What a machine needs first. A machine that is still warm has both.
kernels() {
  py kernels 120 -m nestpipe.kernels.library
}
peers() {
  if [[ $mode != run ]] || compgen -G '.lab/piece.*' >/dev/null; then
    local pieces=(.lab/piece.*)
    py peers_put 30 tools/lab.py put "${pieces[@]}"
    py peers_unpack 60 tools/lab.py unpack
  else
    echo "no .lab/piece.*: NestPipe runs alone"
  fi
}
before() {  # before COMMAND...: a step with the sources of the older commit
  if [[ $mode == run && ! -d $OLD/src ]]; then
    echo "no $OLD: run \`$0 prepare\` where git is, and bring it"
    return
  fi
  local today=$PYTHONPATH
  PYTHONPATH=$OLD/src
  "$@"
  PYTHONPATH=$today
}

run_slice() {
  slice=$1
  began=$SECONDS
  work=$(mktemp -d)
  [[ $mode == list ]] || mkdir -p "$OUT"
  case $slice in
    first)  # is it right, rows in HBM beside FBGEMM, the host's part, warp groups
      kernels
      gpu_tests gpu_tests 300 -n 10 tests/gpu -k "not (warp_groups or rings)"
      peers
      bench embedding_hbm 80 embedding --where hbm --optimizer sgd,adam --limit 36
      bench dispatch 40 dispatch
      # Checks first, then everything through autograd beside Triton's kernels and torch's.
      py hopper 130 tools/bench_attention.py --only hopper --limit 115 --out "$work/hopper.json"
      gpu_tests hopper_tests 60 -n 6 tests/gpu/test_fused_attention.py -k "warp_groups or rings"
      ;;
    second)  # a DLRM beside TorchRec, rows behind a cache beside FBGEMM, what each switch is worth
      kernels
      peers
      bench dlrm 140 dlrm --keys 1,10 --rounds 2 --limit 34
      py row_copies 60 tools/bench_row_copies.py --home 2000000 --json "$work/row_copies.json"
      # Six batches in turns, as FBGEMM's 2.56 and 13.1 ms were read: all of their rows stay.
      bench cache_six_sgd 115 embedding --where cache --optimizer sgd --set distinct=6 --limit 55
      py switches_cache 120 tools/bench_switches.py --where cache --optimizer sgd --rows 4000000 \
        --distinct 100 --rounds 1 --trace "$work/cache_steps.json.gz" \
        --json "$work/switches_cache.json"
      bench cache_six_adam 125 embedding --where cache --optimizer adam --rows 4000000 \
        --set distinct=6 --limit 60
      for placement in rows table; do
        bench "dlrm_2_$placement" 80 dlrm --ranks 2 --keys 1 --rounds 1 --steps 20 \
          --placement $placement --limit 38
      done
      py kernels_alone 40 tools/bench_device_index.py --no-tests --parts index,evictions,segments \
        --out "$work/kernels_alone.json"
      py switches_hbm 60 tools/bench_switches.py --where hbm --optimizer sgd \
        --json "$work/switches_hbm.json"
      ;;
    third)  # whole pipelines: beside TorchRec and an older commit, checkpoints, a large pool, growth
      kernels
      peers
      bench checkpoint 90 checkpoint --every 100 --set run.device=cuda --set run.batch=128 \
        --set run.precision=bf16 --set data.synthetic.flavour=sequence \
        --set data.synthetic.samples=50000 --set data.synthetic.num_items=1000000 \
        --set data.synthetic.min_len=200 --set data.synthetic.max_len=400 \
        --set model.kind=ranker --set model.dim=512 --set model.blocks=4 --set model.heads=4 \
        --set model.attention_dim=128 --set model.max_len=400
      bench pool_100gb 110 embedding --where hbm --optimizer sgd --rows 11500000 --dim 192 \
        --no-peer --steps 20 --rounds 1 --set distinct=0 --set exponent=0.01 --set warm=230 \
        --limit 105
      # Every plan, both serial loops and TorchRec: rows of one table, written after each case.
      py lab_table 190 tools/lab.py table --only A,C --rounds 1 --forms new,pooled --shares 0.3 \
        --peer-limit 45 --json "$work/lab_table.json"
      before py lab_a_old 60 "$OLD/tools/lab.py" compare A --rounds 1 --forms new --no-peer \
        --json "$work/lab_a_old.json"
      py paper_table 130 tools/lab.py table --only paper --rounds 1 --forms new,pooled \
        --rows 4000000 --shares 0.3 --peer-limit 45 --json "$work/paper_table.json"
      before bench paper_old 60 pipeline --case paper --plans nested,serial --retrieval new \
        --set rows=4000000 --set rounds=1
      bench sweep_tables 60 embedding --where hbm --optimizer sgd --rounds 1 --no-peer \
        --sweep tables=1,10,100,1000 --limit 55
      ;;
    hstu)  # blocks, whole steps of sequences, balanced ranks
      kernels
      bench encoder_long 45 hstu --parts encoder --batch 4 --length 4096 --head-dim 256 --rounds 5 \
        --profile
      bench encoder_long_hopper 45 hstu --parts encoder --batch 4 --length 4096 --head-dim 256 \
        --rounds 5 --attention hopper
      bench encoder_short 45 hstu --parts encoder --batch 32 --length 512 --head-dim 256 --rounds 5 \
        --profile
      bench tasks 230 hstu --parts step --tasks 8 --batch 32 --head-dim 256 --items 50000000 \
        --positions 0 --rounds 2 --plans nested,serial --stored 4000000 --device-memory 4GB \
        --limit 110
      bench tasks_hopper 80 hstu --parts step --tasks 8 --batch 32 --head-dim 256 \
        --items 50000000 --positions 0 --rounds 1 --plans nested --stored 1000000 \
        --device-memory 4GB --attention hopper --limit 70
      bench tasks_balance 210 hstu --parts step --tasks 8 --batch 32 --head-dim 256 \
        --items 50000000 --positions 0 --rounds 2 --ranks 4 --plans nested \
        --balance samples,work --stored 1000000 --device-memory 2GB --limit 100
      bench encoder32 45 hstu --parts encoder --batch 32 --length 4096 --head-dim 256 \
        --lengths uniform --rounds 3
      bench zipf 60 hstu --parts attention --length 4096 --batch 32 --lengths zipf --rounds 5
      ;;
    tests)  # verify and twins on NCCL; everything that only a GPU runs
      kernels
      gpu_tests gpu_tests 500 -n 7 tests/gpu -k "not (warp_groups or rings)"
      ;;
    host)  # at most 1.5 ms; and which part of a step is left to the host
      bench dispatch 120 dispatch
      bench dispatch_10_keys 120 dispatch --keys 10
      bench dispatch_serial 120 dispatch --plan serial
      bench dispatch_4_micros 120 dispatch --micro-batches 4
      py kernels_alone 150 tools/bench_device_index.py --no-tests --out "$work/kernels_alone.json"
      ;;
    embedding)  # at most 1.0x FBGEMM, mark 0.7x
      bench embedding_hbm 250 embedding --where hbm --optimizer sgd,adam --limit 110
      bench embedding_hbm_wide 250 embedding --where hbm --optimizer rowwise_adagrad --dim 256 \
        --limit 110
      ;;
    rows)  # are the bits the same, what is each switch worth, and the recipe of the facts
      kernels
      gpu_tests rows_tests 200 -n 7 tests/gpu/test_cuda_lanes.py tests/gpu/test_pool_cuda.py \
        tests/gpu/test_row_copy.py
      py row_copies 90 tools/bench_row_copies.py --json "$work/row_copies.json"
      py switches_cache 250 tools/bench_switches.py --where cache --optimizer sgd \
        --trace "$work/cache_steps.json.gz" --json "$work/switches_cache.json"
      bench cache_six_sgd 190 embedding --where cache --optimizer sgd --set distinct=6 --limit 90
      py switches_hbm 90 tools/bench_switches.py --where hbm --optimizer sgd \
        --json "$work/switches_hbm.json"
      # Last: FBGEMM's 123 GB of managed memory are nearly all that the machine has.
      bench cache_six_adam 230 embedding --where cache --optimizer adam --set distinct=6 \
        --limit 110
      ;;
    cache)  # at most 0.5x (Adam) and 1.0x (SGD) of FBGEMM's managed cache, fresh keys
      bench cache_sgd 310 embedding --where cache --optimizer sgd --limit 150
      # FBGEMM has all rows of Adam in host memory, 1,536 bytes each: six tenths of it at most.
      adam_rows=$((MEMORY_GB * 600000000 / 15360 / 100000 * 100000))
      ((adam_rows > 8000000)) && adam_rows=8000000
      bench cache_adam 410 embedding --where cache --optimizer adam --rows $adam_rows --limit 200
      bench embedding_hbm 130 embedding --where hbm --optimizer sgd,adam --limit 60
      ;;
    copies)  # how many multiprocessors the link needs, each way and both at once
      py row_copies 200 tools/bench_row_copies.py --json "$work/row_copies.json"
      ;;
    dlrm)  # at least 1.0x TorchRec, mark 1.2x
      bench dlrm 500 dlrm --keys 1,10 --limit 160
      ;;
    ranks)  # two and four ranks on the GPU
      for ranks in 2 4; do
        for placement in rows table; do
          bench "dlrm_${ranks}_$placement" 270 dlrm --ranks $ranks --keys 1 --rounds 2 --steps 20 \
            --placement $placement --limit 85
        done
      done
      ;;
    paper)  # the table of plans, with pooled beside new
      bench paper 540 pipeline --case paper --retrieval new,pooled
      ;;
    lab)  # A to D beside TorchRec
      py lab_table 540 tools/lab.py table --only A,C --rounds 2 --forms new,pooled \
        --json "$work/lab_table.json"
      ;;
    lab_old)  # no slower than before, in the same session
      py lab_new 250 tools/lab.py compare A --rounds 2 --no-peer --forms new,pooled \
        --json "$work/lab_new.json"
      before py lab_old 250 "$OLD/tools/lab.py" compare A --rounds 2 --no-peer \
        --json "$work/lab_old.json"
      before bench paper_old 250 pipeline --case paper --plans nested,serial
      ;;
    memory)  # a pool of 100 GB with more than 100 million rows, near all of them touched
      bench pool_100gb 540 embedding --where hbm --optimizer sgd --rows 11500000 --dim 192 \
        --no-peer --steps 20 --rounds 2 --set distinct=0 --set exponent=0.01 --set warm=320 \
        --limit 530
      ;;
    quality)  # MovieLens, all recipes and seeds at once; again: they go on
      kernels
      py quality 530 tools/quality_runs.py --data "${MOVIELENS:-.lab/ml-1m}" --limit 440 \
        --json "$work/quality.json"
      ;;
    sweeps)  # no step in the growth that the text does not explain
      for sweep in tables=1,10,100,1000 dim=16,64,128,256,512 samples=1000,10000,100000,400000 \
        rows=10000,100000,1000000,4000000; do
        bench "sweep_${sweep%%=*}" 270 embedding --where hbm --optimizer sgd --rounds 1 \
          --sweep "$sweep" --limit 130
      done
      bench sweep_share 140 embedding --where cache --optimizer sgd --rounds 1 --no-peer \
        --rows 2000000 --sweep share=0.05,0.1,0.3,0.6 --limit 130
      ;;
    *)
      echo "there is no slice '$slice'; use one of $ALL_SLICES" >&2
      exit 2
      ;;
  esac
  rm -rf "$work"
}

case ${1:-} in
  prepare)
    rm -rf "$OLD" && mkdir -p "$OLD"
    git archive "$OLD_COMMIT" src tools pyproject.toml | tar x -C "$OLD"
    echo "$OLD holds $OLD_COMMIT; carry it to the GPU machine with the pieces in .lab"
    ;;
  rehearse | list)
    mode=$1
    shift
    # shellcheck disable=SC2086  # names without spaces
    (($#)) || set -- $FIRST_SLICES
    for one in "$@"; do
      run_slice "$one"
    done
    ;;
  '' | -*)
    sed -n '2,19p' "$0"
    exit 2
    ;;
  *)
    run_slice "$1"
    printf '\n'
    "$PYTHON" -c 'import json, sys
for step in json.load(open(sys.argv[1])):
    print("%-24s %16s %4d s" % (step["step"], step["status"], step["seconds"]))' "$OUT/$1.json"
    ;;
esac
exit $failed
