"""Earlier path of ``verl.utils.numerics.seeding``, which recipes import."""

from verl.utils.numerics.seeding import derive_seed as derive_seed
from verl.utils.numerics.seeding import prompt_uids as prompt_uids
from verl.utils.numerics.seeding import sampling_seeds as sampling_seeds
from verl.utils.numerics.seeding import seed_process as seed_process
