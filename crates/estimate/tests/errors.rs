//! Tests models that do not fit together, and hostile files.

use gpumem_estimate::{Input, Layer, Loss, Model, Optimizer, Shape, Step, models, numbered};
use serde_json::json;

fn model(layers: impl IntoIterator<Item = Layer>, input: Input) -> Model {
    Model { name: "test".to_owned(), input, layers: numbered(layers), loss: Loss::default() }
}

fn numbers(shape: &[u64]) -> Input {
    Input::Numbers(Shape::from(shape.to_vec()))
}

const IMAGE: &[u64] = &[3, 8, 8];
const TOKENS: &[u64] = &[5, 8];

/// Returns layers from a text such as `flatten; linear inputs=5 outputs=5`.
pub(crate) fn layers(text: &str) -> Vec<Layer> {
    let layer = |text: &str| {
        let (kind, fields) = text.split_once(' ').unwrap_or((text, ""));
        let mut layer = json!({"type": kind});
        for (field, value) in fields.split(' ').filter_map(|field| field.split_once('=')) {
            layer[field] = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        }
        serde_json::from_value(layer).unwrap()
    };
    text.split("; ").map(layer).collect()
}

fn message(layers: impl IntoIterator<Item = Layer>, input: Input) -> String {
    Step::inference(2).estimate(&model(layers, input)).unwrap_err().to_string()
}

/// Compares a message with the expected one, which is only its start if it ends with `*`.
fn fits(found: &str, expected: &str) -> bool {
    expected.strip_suffix('*').map_or(found == expected, |start| found.starts_with(start))
}

#[test]
fn a_mismatch_names_the_layer_and_both_shapes() {
    let large = "the sizes are too large: the sum does not fit into 62 bits";
    let experts = |sizes: &str| format!("experts hidden=4 experts=3 function=silu {sizes}");
    let provided = |size| format!("provide slot=text sizes=[3,{size}]; attention size=8 heads=2 reads=text");
    let (wide, narrow) = (u64::MAX, 1_u64 << 40);
    for (input, text, expected) in [
        (IMAGE, "flatten; linear inputs=5 outputs=5", "1`: expects an input of shape (…, 5) and gets (2, 192)"),
        (IMAGE, "dropout probability=-5", "0`: -5 is not a probability"),
        (IMAGE, "batch_norm channels=5", "0`: expects an input of shape (2, 5, 8, 8) and gets (2, 3, 8, 8)"),
        (IMAGE, "conv inputs=3 outputs=4 kernel=[9,9]", "0`: expects an input of shape a window of 9 with stride 1*"),
        (IMAGE, "conv inputs=3 outputs=4 kernel=[3,3] stride=[0] padding=[1]", "0`: expects*"),
        (IMAGE, "conv inputs=3 outputs=4 kernel=[0,0] padding=[1]", "0`: expects*"),
        (IMAGE, &format!("linear inputs={narrow} outputs={narrow}"), &format!("0`: {large}")),
        (IMAGE, &format!("conv inputs={wide} outputs={wide} kernel=[3,3]"), &format!("0`: {large}")),
        // Each of the two layers has 2^61 bytes.
        (
            IMAGE,
            "linear inputs=1073741824 outputs=536870912; linear inputs=536870912 outputs=1073741824",
            &format!("1`: {large}"),
        ),
        (IMAGE, "linear inputs=192 outputs=2 tied_to=x", "0`: no layer before it has the path `x` and a weight*"),
        (IMAGE, "tied_embedding tied_to=x", "0`: no layer before it has the path `x` and a weight to share"),
        (IMAGE, "attention size=8", "0`: 0 heads cannot share 0 heads of keys"),
        (IMAGE, "attention size=8 heads=1 key_value_heads=2", "0`: 1 head cannot share 2 heads of keys"),
        (IMAGE, "embedding rows=10 size=4", "0`: an embedding needs integers and gets f32"),
        (IMAGE, "embeddings tokens=0 size=4", "0.tokens`: an embedding needs integers and gets f32"),
        (TOKENS, &experts("size=9 per_token=2"), "0`: expects an input of shape (…, …, 9) and gets (2, 5, 8)"),
        (TOKENS, &experts("size=8 per_token=0"), "0`: a token cannot pass through 0 of 3 experts"),
        (TOKENS, &experts("size=8 per_token=4"), "0`: a token cannot pass through 4 of 3 experts"),
        (TOKENS, "attention size=8 heads=2 reads=text", "0`: no layer before it leaves `text`"),
        (TOKENS, "attention size=8 heads=2 reads=encoder", "0`: no layer before it leaves `encoder`"),
        (TOKENS, &provided(7), "1`: expects an input of shape (2, …, 8) and gets (2, 3, 7)"),
        (TOKENS, "attention size=8 heads=2 rotates=true rotated=5", "0`: heads of 4 cannot rotate 5 elements"),
        (TOKENS, "attention size=8 heads=2 relative=true", "0`: no layer before it has a table of position biases"),
        (TOKENS, "positions rows=4 size=8", "0`: expects an input of shape (…, 4 or less, 8) and gets (2, 5, 8)"),
        (TOKENS, "encoder_decoder encoder=[] decoder=[]", "0`: a decoder needs target tokens"),
    ] {
        let found = message(layers(text), numbers(input));
        assert!(fits(&found, &format!("layer `{expected}")), "{text}: {found}");
    }
    for fitting in [provided(8), "attention size=8 heads=2 head_size=3 norm=rms".to_owned()] {
        assert!(Step::inference(2).estimate(&model(layers(&fitting), numbers(TOKENS))).is_ok(), "{fitting}");
    }
    let both = model(layers("encoder_decoder encoder=[] decoder=[]"), Input::Pair { source: 4, target: 3 });
    assert!(Step::inference(2).estimate(&both).is_ok());
    let inner = [Layer::sequence([Layer::conv2d(3, 4, 3, 1, 1), Layer::conv2d(8, 4, 3, 1, 1)])];
    let error = Step::inference(2).estimate(&model(inner, numbers(IMAGE))).unwrap_err();
    assert_eq!(error.layer(), "0.1");
    let expected = "layer `0.1`: expects an input of shape (…, 8, …, …) and gets (2, 4, 8, 8)";
    assert_eq!(error.to_string(), expected);
    let trained = Step::training(2, Optimizer::Sgd).estimate(&model([Layer::conv2d(3, 4, 3, 1, 1)], numbers(IMAGE)));
    let expected = "the loss expects an output of shape (2, 8) and gets (2, 4, 8, 8); the model's `loss` can be `next_token`, `token` or \
        `mean_squares`";
    assert!(trained.unwrap_err().to_string().ends_with(expected));
    let inner = numbered([Layer::conv2d(3, 4, 3, 1, 1)]);
    let residual = Layer::Residual { layers: inner, shortcut: vec![], in_place: false };
    let expected = "layer `0`: a sum does not work with the shapes (2, 3, 8, 8) and (2, 4, 8, 8)";
    assert_eq!(message([residual], numbers(IMAGE)), expected);
    let huge = || numbers(&[u64::MAX, u64::MAX]);
    assert_eq!(message([Layer::Flatten], huge()), large);
    assert!(Step::inference(1).estimate(&model([Layer::Flatten], huge())).is_err());
    assert!(Step::training(u64::MAX, Optimizer::Adam).estimate(&models::vgg19()).is_err());
}

#[test]
fn names_and_nested_layers_are_limited() {
    // The nesting is below the limit of the parser, and above that of a model.
    let nested = (0..100).fold(Layer::Flatten, |layer, _| Layer::sequence([layer]));
    assert!(message([nested], numbers(IMAGE)).ends_with("layers are nested deeper than 64"));
    // Each layer has the names of all layers around it.
    let inside = Layer::Sequential { layers: vec![Layer::Flatten.named("b".repeat(300))] };
    let long = Model { layers: vec![inside.named("a".repeat(300))], ..model([], numbers(IMAGE)) };
    let error = Step::inference(1).estimate(&long).unwrap_err().to_string();
    assert_eq!(error, "the names of layers make a path of more than 500 bytes");
}

#[test]
fn models_are_read_from_toml() {
    let text = r#"
        name = "small"
        loss = "next_token"
        input = { tokens = 16 }
        [[layers]]
        name = "embedding"
        type = "embedding"
        rows = 100
        size = 8
        [[layers]]
        name = "blocks"
        type = "sequential"
        layers = [
            { name = "norm", type = "rms_norm", size = 8 },
            { name = "head", type = "linear", inputs = 8, outputs = 100, no_bias = true, tied_to = "embedding" },
        ]
    "#;
    let model = Model::from_toml(text).unwrap();
    assert_eq!(model.loss, Loss::NextToken);
    assert_eq!(Step::training(2, Optimizer::Sgd).estimate(&model).unwrap().parameters, 800 + 8);
    let error = |text: &str| Model::from_toml(text).unwrap_err().to_string();
    let place = "this is not a model: layer `blocks.norm` (`layers[1].layers[0]`): ";
    let message = error(&text.replace("rms_norm", "b_norm"));
    assert!(
        message.starts_with(&format!("{place}unknown variant `b_norm`, expected one of `sequential`, ")),
        "{message}"
    );
    assert_eq!(error(&text.replace("input =", "heads = 1\ninput =")), "this is not a model: there is no field `heads`");
    assert!(error("name = 1").starts_with("this is not a model: "));
}

#[test]
fn a_wrong_layer_is_named() {
    let error = |layer: &str| {
        let inner = format!(
            r#"{{"name": "mlp", "type": "residual", "layers": [{{"name": "a", "type": "flatten"}}, {layer}]}}"#
        );
        let text = format!(r#"{{"name": "", "input": {{"tokens": 1}}, "layers": [{inner}]}}"#);
        let message = Model::from_json(&text).unwrap_err().to_string();
        message.strip_prefix("this is not a model: ").expect("what it is about").to_owned()
    };
    for (fields, what) in [
        (r#""type": "linear", "inputs": 4"#, "missing field `outputs`"),
        (r#""inputs": 4"#, "missing field `type`"),
        (r#""type": "linear", "outputs": 4, "inputs": -1"#, "invalid value: integer `-1`, expected u64"),
        (r#""type": "activation", "function": "tan""#, "unknown variant `tan`, expected one of `relu`*"),
        (r#""type": "linear", "inputs": 4, "outputs": 4, "no_bais": true"#, "there is no field `no_bais`"),
        (r#""type": "flatten", "layers": [{"name": "c", "type": "flatten"}]"#, "there is no field `layers`"),
    ] {
        let found = error(&format!(r#"{{"name": "b", {fields}}}"#));
        assert!(fits(&found, &format!("layer `mlp.b` (`layers[0].layers[1]`): {what}")), "{found}");
    }
    let unnamed = error(r#"{"type": "flatten"}"#);
    assert_eq!(unnamed, "layer `mlp` (`layers[0].layers[1]`): missing field `name`");
    let model = Model::from_json(r#"{"layers": [], "input": {"tokens": 1}}"#).unwrap_err().to_string();
    assert!(model.starts_with("this is not a model: missing field `name`"), "{model}");
}

/// The depth of hostile values.
const DEEP: usize = 100_000;

#[test]
fn hostile_texts_are_errors() {
    let open = r#"{"name":"a","type":"sequential","layers":["#.repeat(DEEP);
    assert!(Model::from_json(&format!(r#"{{"name": "", "input": {{"tokens": 1}}, "layers": [{open}"#)).is_err());
    assert!(Model::from_json(r#"{"name": "", "input": {"tokens": -1}, "layers": []}"#).is_err());
    let (dots, start) = (".a".repeat(DEEP), "name = \"a\"\nlayers = []\ninput = ");
    for toml in [
        format!("layers = {}", "[".repeat(DEEP)),
        format!("layers = {}{}", "[".repeat(DEEP), "]".repeat(DEEP)),
        format!("layers = {}{}", "{a=".repeat(DEEP), "}".repeat(DEEP)),
        format!("a{dots} = 1"),
        format!("[a{dots}]"),
        format!("[[a{dots}]]"),
        format!("{start}{{ tokens{dots} = 1 }}"),
        format!("{start}{{ tokens = 1{} }}", "0".repeat(DEEP)),
        format!("{start}{{ tokens = -1 }}"),
    ] {
        let message = Model::from_toml(&toml).unwrap_err().to_string();
        assert!(message.starts_with("this is not a model: "), "{message}");
    }
}
