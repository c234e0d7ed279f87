"""The typed configuration: one dataclass for each Hydra group and each task. No torch.

Hydra merges yaml and the command line into these schemas; the result is converted to dataclasses and checked
once (validation). No other module sees a DictConfig.
"""

from llama_ssp.config.run import *
from llama_ssp.config.schema import *
from llama_ssp.config.tasks import *
