#!/bin/sh
# Run presets of streams on pocket and write their tables to docs/lab/streams-tables.md.
#
#     benchmarks/streams.sh [OUT [KIND...]]    # run folders go to OUT, by default runs-streams
#
# By default the four kinds of docs/lab/streams.md: two hours on one core. Finished runs are not
# repeated: the same command resumes. Other kinds: `coda bench --list`.
set -eu
cd "$(dirname "$0")/.."
out=${1:-runs-streams}
[ $# -gt 0 ] && shift
kinds=${*:-domains few-shot online blurry}
for kind in $kinds; do
  coda bench "pocket-$kind" --out "$out"
done
coda report "$out" -o "$out/report"
{
  printf '# Tables of streams on pocket\n\n'
  printf 'Written by benchmarks/streams.sh; [what they say](streams.md). Three trials. '
  printf 'Kinds and measures: [streams](../guide/streams.md).\n\n'
  sed -e '/^!\[/d' -e 's/^## /### /' -e 's/^# /## /' "$out/report/report.md"
} > docs/lab/streams-tables.md
cp "$out/report/pictures/pocket-online/anytime.png" docs/lab/streams-anytime.png
