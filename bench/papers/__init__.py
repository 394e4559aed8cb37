"""Recompute what papers print from what they print beside it, cell by cell.

A paper is a file in ``printed``: the printed inputs, the printed results, and which of `formulas`
leads from one to the other.
"""
