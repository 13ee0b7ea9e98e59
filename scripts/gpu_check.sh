#!/usr/bin/env bash
# Checks and measures the worker on one GPU in less than 8 minutes, without downloading anything.
#
#   scripts/gpu_check.sh --model DIR|FILE [--wheels DIR] [--device cuda|cpu] [--quick] [--out DIR]
#
#   --model   a small model with weights and tokenizer: its folder, or an archive of it (.tar, .tar.gz, .zip, .whl);
#             with --quick it may be left out, then a tiny random one is made
#   --wheels  packages the machine's Python lacks, installed from this folder into an environment beside it
#   --out     where logs and results go (build/gpu_check)
#   --device cpu --quick runs the same on a CPU and tiny models, to see that the checks themselves work
#
# One line per step: PASS or FAIL, seconds, what was seen. The exit status is the number of steps that failed.
set -u
cd "$(dirname "$0")/.." || exit 99

model="" wheels="" device=cuda quick="" out=build/gpu_check total=480
while [ $# -gt 0 ]; do
    case $1 in
        --model) model=$2; shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        --device) device=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --quick) quick=--quick; shift ;;
        *) sed -n '2,12p' "$0"; exit 99 ;;
    esac
done
scale=1
[ "$device" = cpu ] && scale=4 total=1800  # a busy machine without a GPU is in no hurry
if [ -z "$model" ] && [ -z "$quick" ]; then sed -n '2,12p' "$0"; exit 99; fi

python=${PYTHON:-python3}
mkdir -p "$out"
began=$SECONDS failed=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1

# attempt NAME SECONDS COMMAND...: within its own time and what is left of all; what is to be said of it goes to a file
attempt() {
    local name=$1 limit=$(($2 * scale)) left=$((total - (SECONDS - began))) start=$SECONDS code
    shift 2
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 1 ]; then
        code=124
        : >"$out/$name.log"
    else
        timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
        code=$?
    fi
    if [ $code -eq 0 ]; then
        printf 'PASS  %-10s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log")" >"$out/$name.said"
        return 0
    fi
    [ $code -eq 124 ] || [ $code -eq 137 ] && echo "not done in $limit s" >>"$out/$name.log"
    {
        printf 'FAIL  %-10s %4d s  exit %d\n' "$name" $((SECONDS - start)) $code
        tail -n 12 "$out/$name.log" | sed 's/^/      /'
    } >"$out/$name.said"
    return 1
}

# step NAME SECONDS COMMAND...
step() {
    attempt "$@"
    said "$1" $?
}

# said NAME CODE
said() {
    cat "$out/$1.said"
    [ "$2" -eq 0 ] && return 0
    failed=$((failed + 1))
    return 1
}

# beside NAME SECONDS COMMAND...: on a CPU while the one before it still runs; a GPU does one thing at a time
before=""
beside() {
    if [ "$device" != cpu ]; then
        step "$@"
        return
    fi
    attempt "$@" &
    local begun=$1:$!
    settle
    before=$begun
}
settle() {
    [ -z "$before" ] && return
    wait "${before#*:}"
    said "${before%%:*}" $?
    before=""
}

if [ -n "$wheels" ]; then
    step venv 30 "$python" -m venv --system-site-packages "$out/venv" || exit $failed
    # What the machine has may itself lie in an environment, which a new one does not see.
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$(echo "$out"/venv/lib/python3*/site-packages)/machine.pth"
    python=$(cd "$out" && pwd)/venv/bin/python
    step wheels 120 "$python" -m pip install --no-index --no-deps --quiet "$wheels"/*.whl || exit $failed
fi
step versions 60 "$python" -m scripts.gpu_check.prepare versions --device "$device" || exit $failed
cat "$out/versions.log"
step model 60 "$python" -m scripts.gpu_check.prepare model --model "$model" --out "$out/model" || exit $failed
model=$(tail -n 1 "$out/model.log")

check() {
    beside "$1" "$2" "$python" -m scripts.gpu_check.checks "$1" --model "$model" --device "$device" $quick
}
check kernels 200
# What the fake of FlashInfer stands for elsewhere, asked of the card.
[ "$device" = cuda ] && step card 90 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu_worker/test_flashinfer_card.py
check parity 90
check cascade 50
check graphs 75
check run-ahead 45
check sampling 30
check resume 60
check masks 45
check fp8 75
beside layers 45 "$python" -m scripts.gpu_check.layers --device "$device" $quick
settle
step benchmark 200 "$python" benchmarks/gpu.py --model "$model" --device "$device" $quick --write "$out/gpu.json"
[ -s "$out/benchmark.log" ] && grep -v '^20.*\[info' "$out/benchmark.log"
echo "$failed steps failed, $((SECONDS - began)) s in all; logs in $out"
exit "$failed"
