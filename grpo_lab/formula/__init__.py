"""The sizes of a GRPO step's tensors, in plain whole numbers: what `estimate` adds up. No torch."""
