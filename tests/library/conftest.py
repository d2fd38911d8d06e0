"""What the tests of the expert library share."""

from support.library_models import models

__all__ = ["models"]
