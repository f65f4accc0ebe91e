#!/usr/bin/env bash
# What is measured on a GPU, in slices of under ten minutes, most telling first.
#
#   tools/gpu_session.sh prepare        where git is: the sources to compare with, into .lab/old
#   OUT=out tools/gpu_session.sh SLICE  on the GPU machine; figures go to $OUT as JSON
#
# Slices: tests rows host embedding cache copies dlrm ranks paper lab lab_old memory sweeps.
# Needs torch with CUDA, triton and nvcc, and no network. TorchRec and FBGEMM come by
# `tools/lab.py put` and `unpack`; without them NestPipe runs alone.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
OLD=${OLD:-.lab/old}
OLD_COMMIT=${OLD_COMMIT:-e6b15e1}
LIMIT=${LIMIT:-540}
MEMORY_GB=${MEMORY_GB:-128}  # of the machine when it has grown; its own count may start far lower
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"
failed=0

# Run a command under what is left of the slice's time; its output is kept beside its figures.
began=$SECONDS
step() {
  local name=$1 left=$((LIMIT - (SECONDS - began)))
  shift
  if ((left < 10)); then
    echo "$name: no time left" | tee -a "$OUT/left_out.txt"
    failed=1
    return
  fi
  echo "== $name: $*"
  timeout "$left" "$@" 2>&1 | tee "$OUT/$name.txt" | tail -n 40
  local status=${PIPESTATUS[0]}
  if ((status)); then
    echo "$name: status $status" | tee -a "$OUT/left_out.txt"
    failed=1
  fi
}
bench() {
  local name=$1
  shift
  step "$name" python -m nestpipe bench "$@" --json "$OUT/$name.json"
}

case ${1:-} in
  prepare)
    rm -rf "$OLD" && mkdir -p "$OLD"
    git archive "$OLD_COMMIT" src tools pyproject.toml | tar x -C "$OLD"
    echo "$OLD holds $OLD_COMMIT; carry it to the GPU machine with the pieces in .lab"
    ;;
  tests)  # line 5: verify and twins on NCCL; everything that only a GPU runs
    step kernels python -m nestpipe.kernels.library
    step gpu_tests python -m pytest -q -n 7 -p no:benchmark tests/gpu
    ;;
  host)  # line 8: at most 1.5 ms; and which part of a step is left to the host
    bench dispatch dispatch
    bench dispatch_10_keys dispatch --keys 10
    bench dispatch_serial dispatch --plan serial
    bench dispatch_4_micros dispatch --micro-batches 4
    step kernels_alone python tools/bench_device_index.py
    ;;
  embedding)  # line 1: at most 1.0x FBGEMM, mark 0.7x
    bench embedding_hbm embedding --where hbm --optimizer sgd,adam
    bench embedding_hbm_wide embedding --where hbm --optimizer rowwise_adagrad --dim 256
    ;;
  rows)  # line 2: are the bits the same, what is each switch worth, and the recipe of the facts
    step kernels python -m nestpipe.kernels.library
    LIMIT=$((SECONDS - began + 200)) step rows_tests python -m pytest -q -n 7 -p no:benchmark \
      tests/gpu/test_cuda_lanes.py tests/gpu/test_pool_cuda.py tests/gpu/test_row_copy.py
    step row_copies python tools/bench_row_copies.py --json "$OUT/row_copies.json"
    step switches_cache python tools/bench_switches.py --where cache --optimizer sgd \
      --trace "$OUT/cache_steps.json.gz" --json "$OUT/switches_cache.json"
    # Six batches in turns, as FBGEMM's 2.56 and 13.1 ms were read: all of their rows stay.
    bench cache_six_sgd embedding --where cache --optimizer sgd --set distinct=6 --limit 90
    step switches_hbm python tools/bench_switches.py --where hbm --optimizer sgd \
      --json "$OUT/switches_hbm.json"
    # Last: FBGEMM's 123 GB of managed memory are nearly all that the machine has.
    bench cache_six_adam embedding --where cache --optimizer adam --set distinct=6 --limit 110
    ;;
  cache)  # line 2: at most 0.5x (Adam) and 1.0x (SGD) of FBGEMM's managed cache, with fresh keys
    bench cache_sgd embedding --where cache --optimizer sgd --limit 150
    # FBGEMM has all rows of Adam in host memory, 1,536 bytes each: six tenths of it at most.
    adam_rows=$((MEMORY_GB * 600000000 / 15360 / 100000 * 100000))
    ((adam_rows > 8000000)) && adam_rows=8000000
    echo "Adam: $adam_rows rows a table, for $MEMORY_GB GB of host memory"
    bench cache_adam embedding --where cache --optimizer adam --rows $adam_rows --limit 200
    bench embedding_hbm embedding --where hbm --optimizer sgd,adam --limit 60
    ;;
  copies)  # how many multiprocessors the link needs, each way and both at once
    step row_copies python tools/bench_row_copies.py --json "$OUT/row_copies.json"
    ;;
  dlrm)  # line 3, one rank: at least 1.0x TorchRec, mark 1.2x
    bench dlrm dlrm --keys 1,10
    ;;
  ranks)  # line 3, two and four ranks on the GPU
    for ranks in 2 4; do
      for placement in rows table; do
        bench "dlrm_${ranks}_$placement" dlrm --ranks $ranks --keys 1 --rounds 2 --steps 20 \
          --placement $placement --limit 130
      done
    done
    ;;
  paper)  # line 6: the table of plans, with pooled beside new
    bench paper pipeline --case paper --retrieval new,pooled
    ;;
  lab)  # line 4: A to D beside TorchRec
    step lab_table python tools/lab.py table --only A,C --rounds 2 --forms new,pooled \
      --json "$OUT/lab_table.json"
    ;;
  lab_old)  # line 4: no slower than before, in the same session
    step lab_new python tools/lab.py compare A --rounds 2 --no-peer --forms new,pooled \
      --json "$OUT/lab_new.json"
    PYTHONPATH=$OLD/src step lab_old python "$OLD/tools/lab.py" compare A --rounds 2 --no-peer \
      --json "$OUT/lab_old.json"
    PYTHONPATH=$OLD/src step paper_old python -m nestpipe bench pipeline --case paper \
      --plans nested,serial --json "$OUT/paper_old.json"
    ;;
  memory)  # line 7: a pool of 100 GB with more than 100 million rows, near all of them touched
    bench pool_100gb embedding --where hbm --optimizer sgd --rows 11500000 --dim 192 --no-peer \
      --steps 20 --rounds 2 --set distinct=0 --set exponent=0.01 --set warm=320 --limit 540
    ;;
  sweeps)  # line 9: no step in the growth that the text does not explain
    for sweep in tables=1,10,100,1000 dim=16,64,128,256,512 samples=1000,10000,100000,400000 \
      rows=10000,100000,1000000,4000000; do
      bench "sweep_${sweep%%=*}" embedding --where hbm --optimizer sgd --rounds 1 \
        --sweep "$sweep" --limit 130
    done
    bench sweep_share embedding --where cache --optimizer sgd --rounds 1 --no-peer \
      --rows 2000000 --sweep share=0.05,0.1,0.3,0.6 --limit 130
    ;;
  *)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
exit $failed
