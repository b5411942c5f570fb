"""pure. Preference data: records with answers that are compared, as trees.

    record -> records.py: a prompt and its answers
           -> encode.py: one tree of tokens, the prompt once, a row of fields per answer
           -> partners.py: for KTO, a second answer of another record

- `records.read_preference`: all forms of records.
- `encode.PairEncoder`: takes the place of what `ChatEncoder` does with plain answers.
- `of_run.preferences_of`: the encoder that the options of a run ask for.
"""
