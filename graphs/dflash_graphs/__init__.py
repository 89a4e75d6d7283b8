"""What the graphs of a bundle are: architectures written once, and the emitters that turn them into files."""
