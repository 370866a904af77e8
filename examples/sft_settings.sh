# What scripts of supervised training share. A script sets WORKERS and SAVE_PATH, sources this file and passes the settings that fit, then its own.
{ set +x; } 2> /dev/null # the command, which is printed, shows every setting

for setting in WORKERS SAVE_PATH; do # the first arguments may be others: the number of devices, the folder of checkpoints
    if [[ $# -gt 0 && "$1" != *=* ]]; then
        declare "$setting=$1"
        shift
    fi
done
DATA_DIR="${DATA_DIR:-$HOME/data}"

GSM8K_SFT=( # a question and an answer in the column extra_info
    data.train_files="$DATA_DIR/gsm8k/train.parquet"
    data.val_files="$DATA_DIR/gsm8k/test.parquet"
    data.prompt_key=extra_info
    data.response_key=extra_info
    data.prompt_dict_keys='[question]'
    data.response_dict_keys='[answer]'
)

set -x
