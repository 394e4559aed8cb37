"""The benchmark: the tables of arXiv:2105.14450, measured and set beside what was published.

``python -m bench --help`` lists the verbs.
"""
