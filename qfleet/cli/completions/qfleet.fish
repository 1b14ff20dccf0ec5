# Completion of qfleet for fish: qfleet completion fish | source, or save it as
# ~/.config/fish/completions/qfleet.fish
function __qfleet_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found (command $words[1] __complete $words[2..-1] "$current" 2>/dev/null)
    if test (count $found) -eq 0
        __fish_complete_path "$current"
    else
        printf '%s\n' $found
    end
end
complete -c qfleet -f -a '(__qfleet_complete)'
