from .compared_answers import (
    ComparedPairs as ComparedPairs,
    open_compared_pairs as open_compared_pairs,
)
from .config import (
    DataConfig as DataConfig,
    all_sources as all_sources,
    cache_directory as cache_directory,
    sources_of as sources_of,
)
from .documents import (
    DocumentRow as DocumentRow,
    Documents as Documents,
    prepare_documents as prepare_documents,
    read_texts as read_texts,
)
from .kinds.chat_template import (
    parse_chat_template_kwargs as parse_chat_template_kwargs,
    read_chat_template as read_chat_template,
    with_chat_template as with_chat_template,
)
from .kinds.kind import (
    LABELED as LABELED,
    PAIRS as PAIRS,
    ROWS as ROWS,
    Question as Question,
)
from .labeled_texts import LabeledTexts as LabeledTexts, open_labeled_texts as open_labeled_texts
from .pipeline import (
    RowLosses as RowLosses,
    Samples as Samples,
    TokenizedData as TokenizedData,
    open_samples as open_samples,
    prepare_held_out as prepare_held_out,
    prepare_on_ranks as prepare_on_ranks,
    row_losses as row_losses,
    tokenize_all as tokenize_all,
)
from .questions import (
    QuestionRow as QuestionRow,
    read_questions as read_questions,
    render_conversation as render_conversation,
)
from .samples.batch import (
    CHOSEN_PART as CHOSEN_PART,
    IGNORE_INDEX as IGNORE_INDEX,
    NO_WINDOW as NO_WINDOW,
    NUM_PARTS as NUM_PARTS,
    PROMPT_PART as PROMPT_PART,
    REJECTED_PART as REJECTED_PART,
    Batch as Batch,
    Ints as Ints,
    Sample as Sample,
    pad as pad,
    with_attention_mask as with_attention_mask,
)
from .samples.mixture import Concatenation as Concatenation
from .samples.packed_pairs import PackedPairs as PackedPairs
from .samples.packing import PackedRows as PackedRows
from .samples.preferences import (
    ComparedRows as ComparedRows,
    with_extras as with_extras,
)
from .samples.protocol import (
    Dataset as Dataset,
    MapDataset as MapDataset,
    ShuffledDataset as ShuffledDataset,
    SourceDataset as SourceDataset,
)
from .samples.rows import LabeledRows as LabeledRows, Seq2SeqRows as Seq2SeqRows
from .samples.token_values import used_samples as used_samples, with_token_values as with_token_values
from .samples.windows import MaskedWindows as MaskedWindows, WindowDataset as WindowDataset
from .sources.source import open_source as open_source
from .task import (
    SpecialTokens as SpecialTokens,
    Task as Task,
    check_packed as check_packed,
    check_settings_of_task as check_settings_of_task,
    check_task as check_task,
)
from .tokenized.encoder import tokenizer_state as tokenizer_state
from .tokenized.token_cache import cache_errors as cache_errors
from .tokenized.token_file import Array as Array, Examples as Examples
from .validate import (
    check_data as check_data,
    check_source as check_source,
    check_tokenizer as check_tokenizer,
    encode_prompts as encode_prompts,
    refuse_unread as refuse_unread,
)
