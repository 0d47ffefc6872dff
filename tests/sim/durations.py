"""Durations for tests: any numbers, by a hash of what they are for, or none at all but for calls."""

import zlib

from realrl.sim.durations import SampleSizes, meeting_ranks


def draw(sample_id):
    """Lengths that depend on the id alone."""
    number = zlib.crc32(sample_id.encode())
    return SampleSizes((1 + number % 7,), (1 + number // 7 % 9,))


class HashedDurations:
    """Up to `most_s` for everything; equal input gives equal output."""

    def __init__(self, seed=0, *, most_s=1.0):
        self.seed, self.most_s = seed, most_s

    def seconds(self, *what):
        return zlib.crc32(repr((self.seed, what)).encode()) / 2**32 * self.most_s

    def call(self, call, requests, sizes):
        tokens = {rank: sum(sum(sizes[i].tokens) for m in request.minibatches for i in m)
                  for rank, request in requests.items()}  # fmt: skip
        return {rank: self.seconds(call.name, request.step, rank, tokens[rank]) for rank, request in requests.items()}

    def meets(self, call):
        return meeting_ranks(call)

    def hooks(self, call, when, ranks):
        return {rank: self.seconds(call.name, when, rank) for rank in ranks}

    def received_bytes(self, call, when, rank):
        return 100

    def onload(self, role, ranks):
        return {rank: self.seconds(role, rank) for rank in ranks}

    def rows(self, requests, sizes):
        return {rank: self.seconds("rows", request.call, rank) for rank, request in requests.items()}

    def load(self, n_samples):
        return self.seconds("load", n_samples)

    def read(self, n_samples):
        return self.seconds("read", n_samples)

    def free(self):
        return self.seconds("free") / 100

    def save(self, rank):
        return self.seconds("save", rank)

    def write(self, rank):
        return self.seconds("write", rank)

    def start(self):
        return 3 * self.most_s

    def handling(self, n_events):
        return self.most_s / 1000 * n_events

    def latency(self, rank):
        return self.seconds("latency", rank) / 100


class CallDurations(HashedDurations):
    """Seconds of calls by name; everything else takes no time."""

    def __init__(self, of_calls):
        super().__init__(most_s=0.0)
        self.of_calls = of_calls

    def call(self, call, requests, sizes):
        return dict.fromkeys(requests, self.of_calls[call.name])
