"""Samples in, packed (THD) microbatches out. Knows no files and no model's weights.

    from megatron.packing.batch.layout import Alignment
    from megatron.packing.batch.microbatches import layouts_of, pack
    from megatron.packing.batch.reading import read_samples

    samples = read_samples([{"tokens": [5, 6, 7]}, {"tokens": [8, 9]}])
    num_sequences = np.array([2])  # both in one microbatch
    layouts = layouts_of(samples.lengths, num_sequences, Alignment(sequence=4, pack=4))
    microbatch = pack(samples, num_sequences, layouts)[0]
    microbatch["tokens"]    ->    5 6 7 0 8 9 0 0

Names to know:

- `data_schedule.wrap_dataloader`: one global batch, as Megatron-LM's own code calls it
- `plugin.install`: packing in a training script of your own
- `batch.columns`: the table of all fields that samples have
- `scheduling.default.default`: lengths -> rank and microbatch of each sequence
- `step.global_batch.schedule_global_batch`: the data path of a step in order

README.md has the map.
"""
