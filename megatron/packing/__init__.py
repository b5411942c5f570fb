"""Samples in, packed (THD) microbatches out. Knows no files and no model's weights.

Two modules are for users: `data_schedule` (wrap_dataloader, as Megatron-LM calls it) and `plugin` (the hook in a
training script of one's own; `plugin_checks` says what it refuses). `plan` and `calibrate` are commands; what they run
is `megatron.planner`. `flags` makes command lines of dataclasses.

The road, folder by folder; each knows only those before it:

    batch/       the values: samples as flat arrays (reading: as users give them), layout of packs, microbatches
    scheduling/  lengths -> which rank and microbatch each sequence goes to
    step/        one global batch: draw, gather, decide, move, tell, pack (global_batch tells it in order)
    model/       what megatron-core's model needs: get_batch, zigzag, attention, layer_spec, pipeline (the hook on its
                 schedules)

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
"""
