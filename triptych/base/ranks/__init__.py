"""The processes of one worker: rank 0, which is the worker itself, and the ranks 1..R-1 that it starts.

A program is what ranks run: the tower (`encoder`) or the decoder (`pd`). `RankGroup` is rank 0's side,
`Rank` the other ranks'; between them are frames of msgpack over a socket pair, and nothing is pickled.
"""
