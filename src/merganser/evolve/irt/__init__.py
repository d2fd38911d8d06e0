"""Item response theory: abilities of models and demands of questions from who answered what."""

from merganser.evolve.irt.fitting import fit, log_loss
from merganser.evolve.irt.logistic import Posterior, regress
from merganser.evolve.irt.model import IRT, Items, Normal, load

__all__ = ["IRT", "Items", "Normal", "Posterior", "fit", "load", "log_loss", "regress"]
