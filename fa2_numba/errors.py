"""What bad arguments raise, before anything is launched."""


class ArgumentError(ValueError):
    """An argument no attention function accepts; the message names it, its value and the rule."""


class ArgumentTypeError(TypeError):
    """An argument of a wrong type or dtype; the message names it, its type and the rule."""


class TorchArgumentError(ArgumentError, RuntimeError):
    """The same from a torch function; torch's own operators raise RuntimeError."""


class TorchArgumentTypeError(ArgumentTypeError, RuntimeError):
    """A wrong type or dtype given to a torch function."""
