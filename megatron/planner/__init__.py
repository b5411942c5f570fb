"""What packing gains, from lengths alone and without a GPU: schedulers side by side, advice, pictures, calibration."""
