"""Bytes that one rank needs to compute a call: activations, KV cache, weights packed for generation.

Shapes: T tokens of a micro-batch on this rank, H hidden, Q and K the sizes of this rank's queries and of its keys, I
its part of the MLP's inner size, V its part of the vocabulary, L its blocks; b bytes of an element.

The formulas count the tensors that the decoder and the engine of this repository make. They leave out rounding by the
allocator, workspaces of kernels and the program itself.

Invariants:
- no function gives less for more tokens, rows or layers, nor more for a higher degree of sharding.
"""
