"""The doctor for this trainer: a run's model, made small, trained as the run trains it.

- `shrink`: options of a run -> those of a small one with the same layers and layout
- `subject`: a run's model as a subject of `megatron.packing.doctor`
- `before_run`: `train --doctor`
"""
