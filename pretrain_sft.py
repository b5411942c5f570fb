"""Fine-tune a GPT on sequences of any lengths: torchrun --nproc-per-node 2 pretrain_sft.py --help

What is installed as the command megatron-sft, from a checkout; megatron/sft/run.py tells the
story.
"""

from megatron.sft.__main__ import main

if __name__ == "__main__":
    main()
