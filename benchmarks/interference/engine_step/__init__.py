"""What one engine step costs on a GPU, measured with PyTorch alone, and the engine profile that follows from it."""
