"""The suite: generated problems in which every pair of features meets, and their tensors."""
