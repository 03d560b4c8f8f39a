"""vLLM's encoder cache connector over Redis: encoders give embeddings to engines that have reserved room for them.

A distribution of its own, installed beside vLLM as `ppd_ec_redis`; it imports nothing of PPD. docs/protocols.md has the
protocol.
"""
