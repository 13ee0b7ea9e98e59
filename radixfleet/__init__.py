"""RadixFleet: an LLM serving system that computes every shared prefix once."""

from radixfleet.version import __version__

__all__ = ["__version__"]
