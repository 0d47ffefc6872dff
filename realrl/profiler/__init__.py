"""`realrl profile`: measures the machine at hand for the models of an experiment, and writes a hardware file.

    command line ──supervises──► master: which probe next ──RunCall──► workers: the engine, between barriers
                                   └── seconds ──► realrl.sim.fit ──► hardware file

Workers are started as those of a run, and as many: all of them compute at the same time.
"""
