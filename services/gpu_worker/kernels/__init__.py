"""The worker's own CPU kernels: C++ behind a plain C interface. Leaves their use to attention/ and layers/."""


class NativeUnavailable(RuntimeError):
    """The kernels cannot be built or run here; the message says why. Callers fall back to plain torch."""
