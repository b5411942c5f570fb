"""pure. Preference tuning: a model is trained to prefer one answer to another.

    train --loss dpo    ->    records.py: a record's prompt and answers
                              encode.py: one tree of tokens, the prompt computed once
                              references.py: log-probabilities under the weights of the start
                              objective.py: sums per path -> losses.py -> loss, metrics

- `losses.LOSSES`: the losses, as functions of numbers per pair.
- `sft.options.preference.PreferenceConfig`: the options, under TRL's names.
- `encode.PairEncoder`: turns a record into a tree whose paths are answers.
- `objective.Preference`: the loss of a microbatch, and what a step needs before it.
- `references.Reference`: the reference model: a copy of the weights that the run begins with.
"""
