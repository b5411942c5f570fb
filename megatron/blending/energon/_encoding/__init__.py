"""Task encoders."""
