"""Finds contamination between packed sequences, in any trainer, by experiments.

    from megatron.packing.doctor.examine import examine
    from megatron.packing.doctor.subject import Subject

    def logits(sequences, fill):  # as the trainer packs; `fill` is for padding slots
        stream = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])[None]
        out = model(input_ids=stream, position_ids=positions, use_cache=False).logits[0]
        return list(out.split([len(tokens) for tokens in sequences]))

    diagnosis = examine(Subject(name="mine", model=model, vocab_size=1000, logits=logits))
    print(diagnosis.text())

Needs torch and numpy alone: no other package of this project, and no megatron-core. In the order of
reading:

- `subject`: what is examined, and random packs and weights for it
- `probe`: runs that watch or disturb modules
- `experiments`, `locate`, `autopsy`: influence and causality; the module and layers to blame; the
  loss, token by token
- `evidence`: results of all of them
- `decisions` (with `module_kinds`, `loss_reading`): from results to names, as data
- `examine`: all in order; `report`: text and JSON
- `subjects`: ready ones, of which each imports what it examines; `hook`: a script as a subject
"""
