"""What does one engine step cost on a GPU, measured with PyTorch alone?"""
