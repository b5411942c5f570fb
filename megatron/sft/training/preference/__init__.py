"""pure. Preference tuning: the loss compares answers to one prompt.

    before the passes    objective.py counts pairs over ranks; references.py gives the model the
                         weights that it began with, for a pass without gradients
    of a microbatch      sums of log-probabilities per answer -> losses.py -> loss, metrics

- `losses.LOSSES`, `losses.KTO`: the losses, as functions of numbers per pair, or per answer.
- `sft.options.preference.PreferenceConfig`: the options, under TRL's names.
- `objective.Preference`: the loss of a microbatch, and what a step needs before it.
- `references.Reference`: the reference model.

Its data are made in `sft.data.preference`.
"""
