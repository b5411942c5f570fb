"""Output layer, cross entropy and auxiliary losses of packs, as sums over tokens."""
