"""What layers do to attention scores, by name: ALiBi, T5's relative biases, tables of biases, and soft-capping.

``alibi() >> softcap(50.0)`` is a small value. It is given as ``score_mod=`` where a function could be.
"""

from flexmask.scores.score import Score, ScoreMod, alibi, bias, parse, relative_bias, softcap

__all__ = ["Score", "ScoreMod", "alibi", "bias", "parse", "relative_bias", "softcap"]
