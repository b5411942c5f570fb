"""The training loop: steps, their account, evaluations, checkpoints and clean ends."""
