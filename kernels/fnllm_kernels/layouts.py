"""What the ops that all layers call tell torch.compile about the strides of their arguments."""

import torch

# Inductor gives an op's arguments the very strides that they have in eager mode, unless the op is tagged otherwise, and
# for that it writes what it has not written yet, such as angles, slots and tables that all layers share, anew for each
# op that reads it. These ops take any strides, so a step's shared arguments are written once.
ANY_STRIDES = (torch.Tag.flexible_layout,)
