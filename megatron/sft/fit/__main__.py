"""pure. `python -m megatron.sft.fit`: the same as `megatron-sft fit`."""

import sys

from megatron.sft.commands.fit import main

if __name__ == "__main__":
    main(sys.argv[1:], "python -m megatron.sft.fit")
