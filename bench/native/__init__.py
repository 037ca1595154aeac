"""The C programs of `bench.router`: a stub engine and a load generator that are no part of what they measure."""
