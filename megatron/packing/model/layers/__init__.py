"""Parts of a layer that megatron-core's layers lack: norms, additions to the residual, biases."""
