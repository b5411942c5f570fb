"""The trainer: options in, a trained model and its metrics out. `pretrain_sft.py` tells the story.

From the command line to a run:

    options          what a run may be told, a file per group; config puts the groups together
    flags            dataclasses <-> command line and YAML
    environment      what the launcher says
    distributed      start and end the process groups
    cpu_support      megatron-core on CPU; mcore_fixes: its faults, mended from outside
    run_folder       the folders of a run

From files to samples:

    data             sources opened, blended or one after the other, split three ways
    chat_source      a source of megatron.blending as samples
    chat_encoder     a record -> a sample, by the ids of tokenizer
    mixture, stream  which record stands at a position; the samples of each step
    blend_schedule   weights that change over steps
    counts           what was drawn of each source; source_names, source_metrics
    mock_dataset     samples without data, of mock_lengths

Training:

    model, forward   the GPT as this rank holds it; one microbatch through it
    train            the loop: steps, evaluations, checkpoints, a clean end (stop)
    finite           what is NaN or infinite ends the run
    reduction        one small reduction per step: loss, counts, who was asked to stop
    waiting          the sequences that wait between steps
    checkpoint       save, load, continue; unpickling: without running what is in it
    step_account     what a step did -> metrics -> metrics_file (json_lines), schedule_file
    summary, report  what a run achieved, as numbers, a table and a picture (plot)

The planner of packing, with the trainer's sources of lengths:

    planner          python -m megatron.packing.plan; plan_options, plan_checks, plan_run, length_sources
"""
