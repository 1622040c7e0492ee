"""The named masks, by family. Each is a function that returns a short expression; its module's ``__all__`` makes it public.

Takes numbers and data (lengths, ids, tables); gives masks, which the registry knows by the functions' names.
"""

from flexmask.catalogue.blocks import *
from flexmask.catalogue.combinators import *
from flexmask.catalogue.documents import *
from flexmask.catalogue.padding import *
from flexmask.catalogue.prefixes import *
from flexmask.catalogue.sparse import *
from flexmask.catalogue.trees import *
from flexmask.catalogue.vision import *
from flexmask.catalogue.windows import *
