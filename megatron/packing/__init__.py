"""Samples in, packed (THD) microbatches out. Knows no files and no model.

The road of one global batch, file by file:

    sample         one training sequence: as samples come, and as they travel
    layout         where each sequence of a pack starts and ends
    cost           what a pack costs: what schedulers balance, and FLOPs
    fitted_cost    the same in seconds, fitted to measured packs, and its file
    calibrate      measures the packs (python -m megatron.packing.calibrate)
    architecture   a model's options as fields of megatron-core's config
    widths         what Megatron derives of those options where they are left out
    schedule       what a scheduler is asked and answers: which rank and microbatch each sequence goes to
    schedulers     by name: default (see `balance`), empty, dp_balanced, or the user's own
    settings       how this run packs, read from megatron-core's config
    draw           take a rank's samples from the user's iterator
    delay          which outliers wait for later steps (pure); delay_queue holds them meanwhile
    owners         what the ranks that own data do with a batch: draw, gather, let wait, schedule
    lengths        gather the lengths over data parallel; agree on end of data and on errors
    step_plan      what one data-parallel rank does in a step, as numbers
    redistribute   move the samples to the ranks that the schedule names; hand them to tensor-parallel peers
    pack           samples -> one microbatch; the one place that pads
    data_schedule  wrap_dataloader: the few lines that call the files above
    get_batch      a microbatch -> arguments of GPTModel.forward (context-parallel slice, PackedSeqParams)
    zigzag         which tokens a context-parallel rank holds
    attention      packed core attention without Transformer Engine
    layer_spec     layers of megatron-core that take packs, with and without Transformer Engine
    auxiliary_losses  load balancing of experts, multi-token prediction: the same in any pack
    pipeline       the hook on megatron-core's forward-backward functions
    plugin         the hook in a training script of one's own; plugin_checks says what it refuses
    stats          tokens, padding, sum of squares, balance

How `default` finds a schedule, pure and in exact integers:

    step_time      the model of a step: how ranks and stages wait for one another; 1F1B simulated
    work           the sequences by cost
    bounds         what no schedule is quicker than: of packs, ranks and rows (pack_bounds, rank_bounds, row_bounds);
                   row_search (held_beside) in seconds and closer
    pack_fit       whether sequences fit into so many packs, and how: by dominance (pack_reduction), by bin completion
                   (pack_search), by pairs (pack_pairs), by values, which also refute it (pack_values, simplex)
    balance        the search over numbers of microbatches
    even           ways to make ranks and packs even; even_pipelines, even_rows, even_full
    placement      their inner loops, in C++ where it could be built (native), else loops
    repartition    packs made over two by two, where they are full
    anneal         sequences change packs by chance, ever less of it, to make rows shorter
    repacking      packs dealt to ranks, split anew and renamed, in C++ too
    movement       as good a placement that moves fewer tokens
    arrange        the order of each rank's packs, and in pipelines their sizes, as near as can be to the best shape

The planner, which knows lengths only:

    step_record    a scheduled step as one value, to write down and to account for
    compare        schedulers and padding side by side
    advice         what another capacity, layout or batch would change
    step_picture   a step as shapes (step_blocks), drawn by step_page (HTML) and step_plot (matplotlib)
    plan           the command
"""
