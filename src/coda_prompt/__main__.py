"""`python -m coda_prompt` is `coda`: how a training on several devices starts its processes."""

from coda_prompt.cli import main

main()
