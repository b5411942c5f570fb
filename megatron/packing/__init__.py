"""Samples in, packed (THD) microbatches out. Knows no files and no model.

The road of one global batch, file by file:

    sample         one training sequence: as samples come, and as they travel
    layout         where each sequence of a pack starts and ends
    cost, bounds   FLOPs of a sequence: what schedulers balance and MFU reports; lower bounds
    schedule       lengths -> which rank and microbatch each sequence goes to (pure, deterministic)
    settings       how this run packs, read from megatron-core's config
    draw           take a rank's samples from the user's iterator
    delay          which outliers wait for later steps (pure); delay_queue holds them meanwhile
    owners         what the ranks that own data do with a batch: draw, gather, let wait, schedule
    lengths        gather the lengths over data parallel; agree on end of data and on errors
    plan           what one data-parallel rank does in a step, as numbers
    redistribute   move the samples to the ranks that the schedule names; hand them to tensor-parallel peers
    pack           samples -> one microbatch; the one place that pads
    data_schedule  wrap_dataloader: the few lines that call the files above
    get_batch      a microbatch -> arguments of GPTModel.forward (context-parallel slice, PackedSeqParams)
    zigzag         which tokens a context-parallel rank holds
    attention      packed core attention without Transformer Engine
    layer_spec     layers of megatron-core that take packs, with and without Transformer Engine
    load_balancing the load-balancing loss of experts where a pack is empty
    pipeline       the hook on megatron-core's forward-backward functions
    plugin         the hook in a training script of one's own
    stats          tokens, padding, sum of squares, balance
"""
