"""Conversations as tokens: a trajectory grows by appending tokens, in the form that the chat template gives it."""

from verl.utils.chat.chat_format import Appended as Appended
from verl.utils.chat.chat_format import ChatFormat as ChatFormat
from verl.utils.chat.chat_format import Restarted as Restarted
from verl.utils.chat.compare import Difference as Difference
from verl.utils.chat.compare import SanityCheckMode as SanityCheckMode
from verl.utils.chat.compare import whole_differences as whole_differences
from verl.utils.chat.others import CUT as CUT
from verl.utils.chat.others import ControlTexts as ControlTexts
from verl.utils.chat.others import text_tokens as text_tokens
from verl.utils.chat.others import uncut as uncut
from verl.utils.chat.pieces import Piece as Piece
from verl.utils.chat.pieces import header_that_ends_turns as header_that_ends_turns
from verl.utils.chat.pieces import pieces as pieces
from verl.utils.chat.pieces import written_turn as written_turn
