"""Extensions that megatron-core's model and schedules need to train packs."""
