"""What `backend: auto` takes in a run: the back end that is right and was the fastest here, on inputs of this kind.

kind.py     what a choice depends on         trial.py    checks and times back ends
inputs.py   random inputs of a kind          process.py  the same in a process that may hang or die
proof.py    whether a back end is right      cache.py    earlier results of this machine
choices.py  the results, and who takes what  choose.py   all of it in order
"""
