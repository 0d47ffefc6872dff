"""Runs an algorithm under plans that must not change its numbers, and says what changes them.

variants      what each run differs in from the first, the baseline            pure
runs          starts them, as `realrl run` does                                 processes, files
recorder      what each call gave, in the workers                               torch
recording     the form of it, and the reading of it
compare       where a variant leaves the baseline, for the first time           pure
causes        in which variants, and in which way: the usual cause              pure
"""
