"""Sizes of the buffers that model and engine make.

The code that makes a buffer and the code that counts its memory read the same number here.
"""

from __future__ import annotations

FLOAT32 = 4  # bytes of an element
LOGITS_CHUNK = 1 << 26  # elements of logits that are computed at a time
LOGITS_BLOCK = 1 << 19  # float32 logits that the softmax walks over on the CPU: 2 MB
# float32 copies of a product's operands are made in pieces of at most this many elements (16 MB), which the allocator
# keeps for the next one; larger blocks go back to the system, and clearing their pages costs more than the conversion
PRODUCT_PIECE = 1 << 22
PREFILL_TOKENS = 4096  # tokens of prompts that are computed in one pass
ROW_BYTES = 64  # of a token of the batch: its number and position, its place among padded rows, what losses read of it
RESPONSE_ROW_BYTES = 16  # of a token that is generated, until all responses are there: it and two log-probabilities
CALL_ROW_BYTES = 96  # of a token of a train_step: columns that it reads and derives, and the minibatches cut from them
PASS_ROW_BYTES = 96  # of a token of a micro-batch: its columns, positions, places among padded rows; terms of the loss
MASTERS_BUCKET = 1 << 24  # elements of masters or moments that data-parallel ranks gather at a time
REDUCTION_BUCKET = 1 << 24  # elements of gradients that tensor-parallel ranks add up at a time
SLICE_ALIGNMENT = 64  # elements; slices of masters begin where vector units do, so that each is computed as in a whole
DEEPSPEED_BUCKET = 1 << 24  # elements
GRADIENT_BUCKET = 128 << 20  # bytes of gradients that one collective of data-parallel ranks adds up
REALLOC_BUCKET = 64 << 20  # bytes of one message of a reallocation
SAVE_STAGE = 64 << 20  # bytes of each of the two pinned buffers through which a checkpoint leaves the device
REALLOC_LARGE = 1 << 20  # bytes; smaller slices are copied into a message that they share
PIPELINE_PENDING = 4  # batches of a pipeline's messages whose tensors are kept until they have gone
FUSED_PENDING = 8  # the same for two pipelines in one list, whose messages go one by one
BIAS_SUM = 160 << 20  # bytes of partial sums on CUDA: 128 threads in each of 16 blocks on each of some 150 processors
BIAS_SUM_TOKENS = 64  # tokens that a block of threads adds up
GRAPH_POOL = 4 << 20  # bytes of a pool of CUDA graphs for small tensors, beyond what they take
CUDA_LARGE = 1 << 20  # bytes of a tensor that torch's allocator takes to be large on CUDA
CUDA_SEGMENT = 20 << 20  # bytes that it asks the device for at a time, for large tensors
REALLOC_ROUNDS = 2  # rounds under way: one travels while the other is packed or unpacked
