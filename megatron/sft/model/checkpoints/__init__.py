"""Checkpoints of a run, which all ranks write and read together.

A folder of checkpoints (--save) looks like this:

    latest_checkpointed_iteration.txt    the tracker: number of the newest checkpoint
    best_checkpointed_iteration.txt      number of the one with the lowest validation loss
    .lock                                held by the run that saves here
    iter_0000100/                        one checkpoint
        .metadata, *.distcp              megatron-core's distributed checkpoint
        common.pt                        (megatron-core 0.16) values that are not tensors
        huggingface/                     config.json and tokenizer, for `megatron-sft export`
        checksums.json                   size and CRC-32 of all files; written last
    iter_0000200.unfinished/             one that is being written
"""
