#!/bin/sh
# Run the presets of all kinds of streams on pocket and write their tables to docs/lab/streams.md.
#
#     benchmarks/streams.sh [OUT]        # run folders go to OUT, by default runs-streams
#
# About five hours on two cores. Finished runs are not repeated: the same command resumes.
set -eu
cd "$(dirname "$0")/.."
out=${1:-runs-streams}
for kind in domains few-shot online blurry budget b50 classes-and-domains repeated long-tailed long; do
  coda bench "pocket-$kind" --out "$out"
done
coda report "$out" -o "$out/report"
{
  printf '# Streams on pocket\n\n'
  printf 'Written by benchmarks/streams.sh. Kinds and measures: docs/guide/streams.md. Three trials.\n\n'
  sed -e '/^!\[/d' -e 's/^## /### /' -e 's/^# /## /' "$out/report/report.md"
} > docs/lab/streams.md
cp "$out/report/pictures/pocket-online/anytime.png" docs/lab/streams-anytime.png
cp "$out/report/pictures/pocket-budget/cost.png" docs/lab/streams-cost.png
printf '\n![anytime accuracy](streams-anytime.png)\n\n![accuracy against multiply-adds](streams-cost.png)\n' \
  >> docs/lab/streams.md
